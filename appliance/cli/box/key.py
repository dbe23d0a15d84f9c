"""`appliance key`: who may use the box over the network."""

from __future__ import annotations

from collections import defaultdict
from datetime import date, timedelta
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, given, group, with_options
from appliance.cli.errors import BadUsage
from appliance.cli.jobs.request import moment_to_come
from appliance.cli.paths import segment

NONE = "none"


def number(help_: str, least: int, most: int | None = None) -> Any:
    """An option for a whole number, or `none`, which takes the limit away."""

    def parsed(text: str) -> int | str:
        if text == NONE:
            return NONE
        sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
        if not (digits.isascii() and digits.isdigit()) or not least <= (value := int(sign + digits)) <= (
            most or 10**15
        ):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"{text} was given, expected a whole number of {bound}, or none for no limit")
        return value

    return Annotated[Any, typer.Option(metavar="N", help=help_, parser=parsed)]


# What a key may use and spend, by the names of the request. `max_*` and `bounds`: what its jobs may claim before
# others, and what its owner may keep; an operator's key has no such bounds.
LIMITS: dict[str, Any] = {
    "models": Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Models that it may use, of those that its owner may, besides what the owner's jobs make; repeatable. "
            "Default: all.",
        ),
    ],
    "requests_per_minute": number("At least 1.", 1),
    "tokens_per_minute": number("Prompts and completions together.", 1),
    "tokens_per_day": number("Days of UTC.", 1),
    "tokens_per_month": number("Months of UTC.", 1),
    "max_priority": number("The highest priority of its jobs, -1000 to 1000. Default: 0.", -1000, 1000),
    "max_non_preemptible": number("How many unfinished jobs may be so. Default: 0.", 0),
    "max_deadlines": number("Unfinished jobs that have a deadline. Default: 0.", 0),
    "max_held": number("Unfinished jobs that are held. Default: 16.", 0),
    "expires": Annotated[
        str | None,
        typer.Option(
            "--expires",
            metavar="TIME",
            help="When it ends by itself: 30d from now, or a date such as 2026-12-31, which is its last day.",
        ),
    ],
    "bounds": Annotated[
        list[str] | None,
        typer.Option(
            "--bound",
            metavar="NAME=N",
            help="A bound on what the owner may keep, instead of the box's own; repeatable, together the key's: files, "
            "file_bytes, uploads, downloads, batches, jobs, models, model_bytes, background, evals, eval_runs, "
            "eval_bytes, responses, responses_bytes.",
        ),
    ],
}


NO_LIMITS: dict[str, Any] = {}


def _limits_given(
    models: list[str] | None = None, bounds: list[str] | None = None, expires: str | None = None, **numbers: Any
) -> dict[str, Any]:
    return given(models=models or None, **numbers, bounds=_bounds(bounds), expires_s=_expires(expires))


app = group("API keys: who may use the box over the network. Commands on the box itself need none.")


@box_command(
    app,
    "appliance key create --name alice",
    "appliance key create --name ops --scope admin",
    "appliance key create --name dashboard --scope read            sees status, queue and usage, changes nothing",
    "appliance key create --name prometheus --scope metrics        may read the metrics, nothing else",
    "appliance key create --name alice-laptop --owner alice        sees what alice's first key made",
    "appliance key create --name trial --model starter --requests-per-minute 60 --tokens-per-day 100000",
    "appliance key create --name guest --expires 30d                refused after it; also a date, its last day",
    "export OPENAI_API_KEY=$(appliance key create --name ci -o json | jq -r .key)",
)
@with_options("limits", LIMITS, _limits_given)
def create(
    session: Session,
    name: Annotated[str, typer.Option("--name", help="Whose key it is; shown in lists and in the audit log.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            help="inference, fine_tuning, read, metrics or admin; repeatable. Default: the first two; with --model the "
            "first alone.",
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner", help="Who owns what the key makes, and whose share of the devices it uses. Default: NAME."
        ),
    ] = None,
    limits: dict[str, Any] = NO_LIMITS,
) -> None:
    """Make a key and show it once: the box keeps only its SHA-256."""
    body = given(name=name, scopes=scope or None, owner=owner) | {
        name: value for name, value in limits.items() if value != NONE
    }
    answer = session.client.post("/admin/v1/keys", body)
    if not session.as_json:
        output.say(f"Key {answer['name']} ({', '.join(answer['scopes'])}){_until(answer)}. It is not shown again:")
    output.print_json(answer) if session.as_json else print(answer["key"])


@box_command(app, "appliance key rotate alice", "appliance key rotate key_4f2a81")
def rotate(session: Session, key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")]) -> None:
    """Give a key a new secret and show it once. The old one is refused at once; jobs, batches and limits stay."""
    answer = session.client.post(f"/admin/v1/keys/{segment(key)}/rotate")
    if not session.as_json:
        output.say(f"Key {answer['name']} has a new secret, and the old one is refused. It is not shown again:")
        if (removed := answer.get("first_key_file_removed")) is not None:
            output.say(f"{removed} had the old one and was removed.")
    output.print_json(answer) if session.as_json else print(answer["key"])


@box_command(
    app,
    "appliance key limit alice --requests-per-minute 600 --tokens-per-minute 200000",
    "appliance key limit trial --model starter --model ft:starter:acme:v2:Ab3dE",
    "appliance key limit alice --lift tokens_per_minute --lift models",
    "appliance key limit guest --expires 2026-12-31     its last day; `--lift expires`: it lasts",
    "appliance key limit alice --bound file_bytes=500000000000 --bound jobs=10",
)
@with_options("limits", LIMITS, _limits_given)
def limit(
    session: Session,
    key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")],
    lift: Annotated[
        list[str] | None,
        typer.Option(
            "--lift",
            metavar="LIMIT",
            help="Take a limit away, by its name with underscores; repeatable. `--tokens-per-day none` does so too.",
        ),
    ] = None,
    limits: dict[str, Any] = NO_LIMITS,
) -> None:
    """Change what a key may use and spend; limits that are not named stay. It holds from the next request on."""
    unknown = [name for name in lift or () if name not in LIMITS]
    if unknown:
        raise BadUsage(f"--lift {unknown[0]} is not a limit; they are {', '.join(LIMITS)}")
    body = {name: None if value == NONE else value for name, value in limits.items()} | dict.fromkeys(
        "expires_s" if name == "expires" else name for name in lift or ()
    )
    answer = session.client.send("PATCH", f"/admin/v1/keys/{segment(key)}", body=body)
    session.show(answer, lambda row: f"{row['name']}: {_limits(row)}{_until(row)}")


@box_command(app, "appliance key list", "appliance key list --all -o json", name="list")
def list_keys(session: Session, all_: Annotated[bool, typer.Option("--all", help="Revoked ones too.")] = False) -> None:
    """List keys by name, scopes and first characters. Only its owner knows the key itself.

    ASKED: the last hour in which it asked a model; reads and scrapes are not counted."""
    answer = session.client.listed("/admin/v1/keys")
    shown = [key for key in answer["data"] if all_ or key["revoked_s"] is None]
    session.show({**answer, "data": shown}, _table)


@box_command(app, "appliance key revoke alice", "appliance key revoke key_4f2a81")
def revoke(session: Session, key: Annotated[str, typer.Argument(metavar="NAME_OR_ID")]) -> None:
    """Revoke a key at once: its requests, batches and background responses end, its jobs are paused."""
    answer = session.client.delete(f"/admin/v1/keys/{segment(key)}")
    session.show(answer, _revoked)


def _revoked(answer: dict[str, Any]) -> str:
    if answer["already_revoked"]:
        return f"{answer['name']} ({answer['id']}) was revoked already, {formats.moment(answer['revoked_s'])}"
    stopped: dict[str, list[str]] = defaultdict(list, answer["stopped"])
    texts = [
        f"{len(stopped[kind])} {one if len(stopped[kind]) == 1 else many}"
        for kind, one, many in (
            ("jobs", "job is paused", "jobs are paused (`appliance job resume` lets one go on)"),
            ("batches", "batch ends", "batches end"),
            ("responses", "response in background fails", "responses in background fail"),
            ("eval_runs", "run of an eval fails", "runs of evals fail"),
            ("operations", "operation on models fails", "operations on models fail"),
        )
        if stopped[kind]
    ]
    if "admin" in answer["scopes"] and not answer["admin_keys"]:
        texts.append("no key of scope admin is left: until one is made, only commands on the box itself administer it")
    return f"revoked {answer['name']} ({answer['id']})" + "".join(f"; {text}" for text in texts)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "NAME", "OWNER", "SCOPES", "KEY", "LIMITS", "CREATED", "ASKED", "EXPIRES", "REVOKED"),
        (
            (
                *formats.cells(k, "id name owner scopes"),
                f"{k['prefix']}…",
                _limits(k),
                formats.moment(k["created_s"]),
                formats.moment(k.get("last_asked_s")),
                formats.moment(k.get("expires_s")),
                formats.moment(k["revoked_s"]),
            )
            for k in answer["data"]
        ),
        empty="no keys; `appliance key create --name NAME` makes one",
    )


def _limits(key: dict[str, Any]) -> str:
    shown = [
        f"{key[f'{what}_per_{span}']:,} {what}/{short}"
        for what, span, short in (
            ("requests", "minute", "min"),
            ("tokens", "minute", "min"),
            ("tokens", "day", "day"),
            ("tokens", "month", "month"),
        )
        if key.get(f"{what}_per_{span}") is not None
    ]
    shown += [
        f"{key[name]} {what}"
        for name, what, usual in (
            ("max_priority", "priority", 0),
            ("max_non_preemptible", "non-preemptible", 0),
            ("max_deadlines", "deadlines", 0),
            ("max_held", "held", 16),
        )
        if key.get(name, usual) != usual
    ]
    if key.get("models") is not None:
        shown.append(f"only {', '.join(key['models']) or 'what its jobs make'}")
    return "; ".join(shown) or "none"


def _expires(text: str | None) -> float | str | None:
    """A date alone is the key's last day. Raises BadUsage."""
    if text is None or text == NONE:
        return text
    try:
        day_after = date.fromisoformat(text) + timedelta(days=1)
    except ValueError:
        return moment_to_come("--expires", text)
    except OverflowError:
        raise BadUsage(
            f"--expires is {text}, later than a calendar goes; for a key that never ends give none"
        ) from None
    if day_after <= date.today():
        raise BadUsage(f"--expires is {text!r}, which is past; expected a future time, such as 30d from now")
    return moment_to_come("--expires", day_after.isoformat())


def _until(key: dict[str, Any]) -> str:
    return "" if key.get("expires_s") is None else f", until {formats.moment(key['expires_s'])}"


def _bounds(given: list[str] | None) -> dict[str, int] | None:
    """Raises BadUsage. The box checks the names."""
    found = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdigit()):
            raise BadUsage(f"--bound {text} was given, expected NAME=NUMBER")
        found[name] = int(number)
    return found or None
