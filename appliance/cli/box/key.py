"""`appliance key`: who may use the box over the network."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, examples, for_box, group
from appliance.cli.errors import BadUsage
from appliance.cli.paths import segment

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Of the models that its owner may use, those that it may, beside what his jobs make; repeatable. "
        "Default: all.",
    ),
]
RequestsPerMinute = Annotated[int | None, typer.Option("--requests-per-minute", min=1, metavar="N")]
TokensPerMinute = Annotated[
    int | None, typer.Option("--tokens-per-minute", min=1, metavar="N", help="Prompts and completions together.")
]
TokensPerDay = Annotated[int | None, typer.Option("--tokens-per-day", min=1, metavar="N", help="Days of UTC.")]
TokensPerMonth = Annotated[int | None, typer.Option("--tokens-per-month", min=1, metavar="N", help="Months of UTC.")]

# What its jobs may claim before others. An operator's key has no such bounds.
MaxPriority = Annotated[
    int | None, typer.Option("--max-priority", min=-1000, max=1000, metavar="N", help="Of its jobs. Default: 0.")
]
MaxNonPreemptible = Annotated[
    int | None,
    typer.Option("--max-non-preemptible", min=0, metavar="N", help="Of its unfinished jobs. Default: 0."),
]
MaxDeadlines = Annotated[
    int | None,
    typer.Option("--max-deadlines", min=0, metavar="N", help="Unfinished jobs that have a deadline. Default: 0."),
]
MaxHeld = Annotated[
    int | None, typer.Option("--max-held", min=0, metavar="N", help="Unfinished jobs that are held. Default: 16.")
]
Bound = Annotated[
    list[str] | None,
    typer.Option("--bound", metavar="NAME=N", help="Of what the owner may keep, instead of the box's own; repeatable, "
                 "together the key's: files, file_bytes, uploads, batches, jobs, background, responses, "
                 "responses_bytes."),
]  # fmt: skip

app = group("API keys: who may use the box over the network. Commands on the box itself need none.")


@app.command(
    epilog=examples(
        "appliance key create --name alice",
        "appliance key create --name ops --scope admin",
        "appliance key create --name dashboard --scope read            sees status, queue and usage, changes nothing",
        "appliance key create --name prometheus --scope metrics        GET /metrics alone",
        "appliance key create --name alice-laptop --owner alice        sees what alice's first key made",
        "appliance key create --name trial --model starter --requests-per-minute 60 --tokens-per-day 100000",
        "export OPENAI_API_KEY=$(appliance key create --name ci -o json | jq -r .key)",
    )
)
@for_box
def create(
    session: Session,
    name: Annotated[str, typer.Option("--name", help="Whose key it is; shown in lists and in the audit log.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", help="inference, fine_tuning, read, metrics or admin; repeatable. Default: the first two."
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option("--owner", help="Whose is what it makes, and whose part of the devices it shares. Default: NAME."),
    ] = None,
    model: Models = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    tokens_per_month: TokensPerMonth = None,
    max_priority: MaxPriority = None,
    max_non_preemptible: MaxNonPreemptible = None,
    max_deadlines: MaxDeadlines = None,
    max_held: MaxHeld = None,
    bound: Bound = None,
) -> None:
    """Make a key and show it once: the box keeps only its SHA-256."""
    body = {"name": name, "scopes": scope or None, "owner": owner, "models": model or None} | {
        "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day, "tokens_per_month": tokens_per_month, "max_priority": max_priority,
        "max_non_preemptible": max_non_preemptible, "max_deadlines": max_deadlines, "max_held": max_held,
        "bounds": _bounds(bound),
    }  # fmt: skip
    answer = session.client.post("/admin/v1/keys", {k: v for k, v in body.items() if v is not None})
    if not session.as_json:
        output.say(f"Key {answer['name']} ({', '.join(answer['scopes'])}). It is not shown again:")
    output.print_json(answer) if session.as_json else print(answer["key"])


@app.command(
    epilog=examples(
        "appliance key limit alice --requests-per-minute 600 --tokens-per-minute 200000",
        "appliance key limit trial --model starter --model ft:starter:acme:v2:Ab3dE",
        "appliance key limit alice --lift tokens_per_minute --lift models",
        "appliance key limit alice --bound file_bytes=500000000000 --bound jobs=10",
    )
)
@for_box
def limit(
    session: Session,
    key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")],
    model: Models = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    tokens_per_month: TokensPerMonth = None,
    max_priority: MaxPriority = None,
    max_non_preemptible: MaxNonPreemptible = None,
    max_deadlines: MaxDeadlines = None,
    max_held: MaxHeld = None,
    bound: Bound = None,
    lift: Annotated[
        list[str] | None,
        typer.Option("--lift", metavar="LIMIT", help="Take a limit away, by its name with underscores; repeatable."),
    ] = None,
) -> None:
    """Change what a key may use and spend; limits that are not named stay. It holds from the next request on."""
    given = {
        "models": model or None, "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day, "tokens_per_month": tokens_per_month,
        "max_priority": max_priority, "max_non_preemptible": max_non_preemptible, "max_deadlines": max_deadlines,
        "max_held": max_held, "bounds": _bounds(bound),
    }  # fmt: skip
    unknown = [name for name in lift or () if name not in given]
    if unknown:
        raise BadUsage(f"--lift {unknown[0]} is no limit; they are {', '.join(given)}")
    body = {k: v for k, v in given.items() if v is not None} | dict.fromkeys(lift or ())
    answer = session.client.send("PATCH", f"/admin/v1/keys/{segment(key)}", body=body)
    session.show(answer, lambda row: f"{row['name']}: {_limits(row)}")


@app.command("list", epilog=examples("appliance key list", "appliance key list --all -o json"))
@for_box
def list_keys(session: Session, all_: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False) -> None:
    """Every key by name, scopes and first characters; the key itself is known only to its owner."""
    answer = session.client.get("/admin/v1/keys")
    shown = [key for key in answer["data"] if all_ or key["revoked_s"] is None]
    session.show({**answer, "data": shown}, _table)


@app.command(epilog=examples("appliance key revoke alice", "appliance key revoke key_4f2a81"))
@for_box
def revoke(session: Session, key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")]) -> None:
    """Make a key worthless at once: its requests, batches and responses in background end, its jobs are paused."""
    answer = session.client.delete(f"/admin/v1/keys/{segment(key)}")
    session.show(answer, _revoked)


def _revoked(answer: dict[str, Any]) -> str:
    stopped = answer["stopped"]
    told = [
        f"{len(stopped[kind])} {one if len(stopped[kind]) == 1 else many}"
        for kind, one, many in (
            ("jobs", "job is paused", "jobs are paused (`appliance job resume` lets one go on)"),
            ("batches", "batch ends", "batches end"),
            ("responses", "response in background failed", "responses in background failed"),
        )
        if stopped[kind]
    ]  # fmt: skip
    return f"revoked {answer['name']} ({answer['id']})" + "".join(f"; {text}" for text in told)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "NAME", "OWNER", "SCOPES", "KEY", "LIMITS", "CREATED", "REVOKED"),
        (
            (k["id"], k["name"], k["owner"], ", ".join(k["scopes"]), f"{k['prefix']}…", _limits(k),
             formats.moment(k["created_s"]), formats.moment(k["revoked_s"]))
            for k in answer["data"]
        ),
        empty="no keys; `appliance key create --name NAME` makes one",
    )  # fmt: skip


def _limits(key: dict[str, Any]) -> str:
    shown = [
        f"{key[f'{what}_per_{span}']:,} {what}/{short}"
        for what, span, short in (
            ("requests", "minute", "min"), ("tokens", "minute", "min"), ("tokens", "day", "day"),
            ("tokens", "month", "month"),
        )
        if key.get(f"{what}_per_{span}") is not None
    ]  # fmt: skip
    shown += [
        f"{key[name]} {what}"
        for name, what, usual in (
            ("max_priority", "priority", 0), ("max_non_preemptible", "non-preemptible", 0),
            ("max_deadlines", "deadlines", 0), ("max_held", "held", 16),
        )
        if key.get(name, usual) != usual
    ]  # fmt: skip
    if key.get("models") is not None:
        shown.append(f"only {', '.join(key['models']) or 'what its jobs make'}")
    return "; ".join(shown) or "none"


def _bounds(given: list[str] | None) -> dict[str, int] | None:
    """Raises BadUsage; which names there are the box knows."""
    found = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdigit()):
            raise BadUsage(f"--bound {text} was given, expected NAME=NUMBER")
        found[name] = int(number)
    return found or None
