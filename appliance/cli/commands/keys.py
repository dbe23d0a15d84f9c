"""`appliance key create|limit|list|rotate` and `appliance forget`: who may use the box over the network."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session, command, until
from appliance.cli.errors import CommandFailed
from appliance.cli.options import NULL, flag, future, given, named, number, opt, or_null, picked
from appliance.cli.resources import segment

_KEYS = "/admin/v1/keys"
_FORGET = "/admin/v1/forget"
_FORGET_WAIT_S = 600.0


_COUNT = or_null(number(int, 1))
_LIMITS = (
    opt(
        "--model MODEL", "That it may use; repeatable. Default: all.", dest="models", type=or_null(str), action="append"
    ),
    opt("--requests-per-minute N", "At least 1.", type=_COUNT),
    opt("--tokens-per-minute N", "Prompts and completions together.", type=_COUNT),
    opt("--tokens-per-day N", "Days of UTC.", type=_COUNT),
    opt("--tokens-per-month N", "Months of UTC.", type=_COUNT),
    opt("--max-priority N", "Of its jobs; above 0 also deadlines and --no-preemptible. Default: 0.", type=or_null(int)),
    opt("--expires TIME", "30d from now, or a date, which is its last day.", dest="expires_s", type=or_null(future)),
    opt(
        "--bound NAME=N",
        "A bound on what the owner may keep, instead of the box's own; repeatable, together the key's: unfinished, "
        "bytes, responses, responses_bytes.",
        dest="bounds",
        type=or_null(named(number(int, 0))),
        action="append",
    ),
)
"""What a key may use and spend; max-priority, bound: what its jobs may claim before others, and its owner keep."""


def _limits(args: Namespace) -> dict[str, Any]:
    """Return the request's limits from the arguments; None removes a limit."""
    limits = picked(args, _LIMITS)
    for name, kind in (("models", list), ("bounds", dict)):
        if name in limits:
            limits[name] = None if NULL in limits[name] else kind(limits[name])
    return limits


@command(
    "key create",
    opt("--name NAME", "Whose key it is; shown in lists and in the audit log.", required=True),
    opt("--scope SCOPE", "inference, fine_tuning, read, metrics or admin; repeatable.", dest="scopes", action="append"),
    opt("--owner NAME", "Who owns what the key makes, and whose share of the devices it uses. Default: NAME."),
    *_LIMITS,
)
def create(session: Session, args: Namespace) -> None:
    """Make a key and show it once: the box keeps only its SHA-256.

    Scopes are inference and fine_tuning unless --scope names others; with --model inference alone. Models that its
    owner's jobs make are its to use in any case.

    Examples:
      appliance key create --name ops --scope admin
      appliance key create --name prometheus --scope metrics        may read the metrics, nothing else
      appliance key create --name alice-laptop --owner alice        sees what alice's first key made
      appliance key create --name trial --model smollm2-135m --requests-per-minute 60 --tokens-per-day 100000
      export OPENAI_API_KEY=$(appliance key create --name ci -o json | jq -r .key)
    """
    answer = session.client.post(_KEYS, picked(args, "name scopes owner") | given(**_limits(args)))
    _show_secret(session, answer, f"Key {answer['name']} ({', '.join(answer['scopes'])}).")


@command("key rotate", opt("id NAME_OR_ID"))
def rotate(session: Session, args: Namespace) -> None:
    """Give a key a new secret and show it once. The old one is refused at once; jobs, batches and limits stay.

    Examples:
      appliance key rotate alice
    """
    answer = session.client.post(f"{_KEYS}/{segment(args.id)}/rotate")
    _show_secret(session, answer, f"Key {answer['name']} has a new secret, and the old one is refused.")


def _show_secret(session: Session, answer: dict[str, Any], text: str) -> None:
    if session.as_json:
        output.print_json(answer)
    else:
        output.say(f"{text} It is not shown again:")
        print(answer["key"], flush=True)


@command("key limit", opt("id NAME_OR_ID"), *_LIMITS)
def limit(session: Session, args: Namespace) -> None:
    """Change what a key may use and spend, from the next request on.

    `none` takes a limit away; limits that are not named stay.

    Examples:
      appliance key limit trial --model smollm2-135m --model ft:smollm2-135m:acme:v2:Ab3dE
      appliance key limit alice --tokens-per-minute none --model none
    """
    session.show(session.client.send("PATCH", f"{_KEYS}/{segment(args.id)}", body=_limits(args)))


@command("key list", flag("--all", "Revoked ones too."))
def list_keys(session: Session, args: Namespace) -> None:
    """List keys by name, scopes and first characters. Only its owner knows the key itself.

    ASKED: the last hour in which it asked a model; reads and scrapes are not counted.

    Examples:
      appliance key list --all -o json
    """
    answer = session.client.listed(_KEYS)
    shown = [key for key in answer["data"] if args.all or key["revoked_s"] is None]
    columns = (
        "id name owner scopes begins=prefix ?models ?>requests/min=requests_per_minute ?>tokens/min=tokens_per_minute "
        "?>tokens/day=tokens_per_day ?>tokens/month=tokens_per_month created=created_s asked=last_asked_s "
        "?expires=expires_s ?revoked=revoked_s"
    )
    empty = "no keys; `appliance key create --name NAME` makes one"
    session.show({**answer, "data": shown}, lambda found: output.listing(columns, found["data"], empty=empty))


@command(
    "forget",
    opt("--owner NAME", "As `appliance key list` shows it.", required=True),
    flag("--yes", "Do it, and cancel what has not ended; without it, show what would go."),
)
def forget(session: Session, args: Namespace) -> None:
    """Forget a person: their keys, files, responses and their name.

    Deleted are files, uploads, stored responses and chat completions, batches and the folders of jobs; keys
    are revoked; usage and the audit log stay, under a pseudonym. Models trained on the files are listed, and
    stay until `appliance model rm` deletes them. Names of models stay, in usage too.

    Examples:
      appliance forget --owner ann --yes
    """
    if not args.yes:
        session.show(session.client.get(_FORGET, owner=args.owner))
        raise CommandFailed(f"nothing was done: --yes forgets {args.owner}, which cannot be undone")
    answer = until(
        lambda: session.client.post(_FORGET, {"owner": args.owner}),
        lambda now: now["done"],
        lambda now: (f"waiting for the end of {', '.join(now['unfinished'][:5])}", None, None),
        _FORGET_WAIT_S,
        f"forgetting {args.owner}",
    )
    session.show(answer)
