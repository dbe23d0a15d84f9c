"""`appliance forget`: a person leaves, and with them what is theirs."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, group
from appliance.cli.errors import BadUsage, CommandFailed

PATH = "/admin/v1/forget"
_WAIT_S, _PAUSE_S = 600.0, 1.0

app = group("Forget a person: their keys, files, responses and their name.")


@box_command(
    app,
    "appliance forget --owner ann",
    "appliance forget --owner ann --cancel --models --yes",
    "",
    "Deleted are files, uploads, stored responses and chat completions, batches and the folders of jobs; keys",
    "are revoked; usage and the audit log stay, under a pseudonym. Models trained on the files are listed;",
    "--models deletes them too, in every tier. Names of models stay, in usage too.",
)
def forget(
    session: Session,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="As `appliance key list` shows it.")],
    models: Annotated[bool, typer.Option("--models", help="Models trained on their files go too.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel what has not ended, instead of refusing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget a person: their keys, files, responses and their name. Asks first."""
    body = {"owner": owner, "models": models, "cancel": cancel}
    if not yes:
        if not sys.stdin.isatty():
            raise BadUsage("there is no terminal to ask at; --yes goes ahead without asking")
        output.say(_there(session.client.get(PATH, owner=owner), models))
        if not typer.confirm(f"Forget {owner}? This cannot be undone.", err=True):
            raise CommandFailed("nothing was done")
    deadline_s = time.monotonic() + _WAIT_S
    while not (answer := session.client.post(PATH, body))["done"]:
        if time.monotonic() > deadline_s:
            raise CommandFailed(f"not done: {', '.join(answer['waits_for'])} did not end; run this again")
        output.say(f"waiting for the end of {', '.join(answer['waits_for'][:5])}")
        time.sleep(_PAUSE_S)
    session.show(answer, lambda done: _there(done, models))


def _there(answer: dict[str, Any], models: bool) -> str:
    counted = ", ".join(f"{answer[kind]} {kind}" for kind in ("files", "uploads", "batches", "responses", "jobs"))
    done = answer["done"]
    kinds = ("files", "uploads", "batches", "responses", "jobs", "keys", "unfinished", "models")
    if not any(answer[kind] for kind in kinds) and not answer.get("evals"):
        # Of a name that is written wrong as of one that was forgotten before.
        lines = ["nothing here is of this owner: is the name right? `appliance key list --all` shows owners"]
    else:
        lines = [f"{'forgotten' if done else 'there are'}: {counted}; keys: {', '.join(answer['keys']) or 'none'}"]
    if answer["unfinished"]:
        lines.append(f"{'cancelled' if done else 'not ended yet'}: {', '.join(answer['unfinished'])}")
    if answer["models"]:
        fate = ("deleted" if done else "to be deleted") if models else "kept; --models deletes them"
        lines.append(f"models trained on their files ({fate}): {', '.join(answer['models'])}")
    return "\n".join(map(formats.printable, lines))
