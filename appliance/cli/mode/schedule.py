"""`appliance mode schedule`: modes that come and go by the clock."""

from __future__ import annotations

import shlex
import time
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, given, group, seconds_given
from appliance.cli.errors import BadUsage
from appliance.cli.paths import segment

app = group("Mode windows: modes that come and go by the clock, such as serve by day and train by night.")

_BAR_CELLS = 48
_LETTERS = {"serve": "s", "train": "T", "split": "/", "auto": "."}


@box_command(
    app,
    'appliance mode schedule add "0 22 * * *" train --until "0 6 * * *" --tz Europe/Berlin --floor 1',
    'appliance mode schedule add "0 22 * * 1-5" "split --train 6" --for 9h',
    'appliance mode schedule add "0 6 * * *" serve          until another window begins',
    "",
    "The five fields are minute hour day-of-month month day-of-week, in the time zone --tz. A mode set by hand",
    "holds until the next window begins or ends; between windows that end, the mode set by hand holds.",
)
def add(
    session: Session,
    cron: Annotated[str, typer.Argument(metavar="CRON", help="When it begins: five fields in quotes.")],
    mode: Annotated[str, typer.Argument(metavar="MODE", help='serve, train, auto or "split --train N".')],
    train: Annotated[int | None, typer.Option("--train", metavar="N", min=0, help="With split.")] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="CRON", help="When it ends.")] = None,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Its length, such as 9h, 90m or 1h30m.")
    ] = None,
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="IANA name of the time zone.")] = "UTC",
    floor: Annotated[
        int | None, typer.Option("--floor", metavar="N", min=0, help="Devices that serving keeps in it.")
    ] = None,
) -> None:
    """Put a mode in force whenever the clock says so."""
    if until is not None and for_ is not None:
        raise BadUsage("--until and --for both say when the window ends; give one of them")
    policy, devices = _mode(mode, train)
    for_s = None if for_ is None else seconds_given("--for", for_)
    body = given(cron=cron, tz=tz, policy=policy, train_devices=devices, until=until, for_s=for_s, serving_floor=floor)
    answer = session.client.post("/admin/v1/mode/schedule", body)
    session.show(answer, lambda made: f"{made['id']}: {described(made)}; next {formats.moment(made['next_s'])}")
    for other in session.client.get("/admin/v1/mode/schedule")["data"]:
        if other["id"] != answer["id"] and (other["cron"].split(), other["tz"]) == (cron.split(), tz):
            text = f"{other['id']} ({mode_name(other)}) begins at the same times and holds no more: the later one does"
            output.say(f"{text}; `appliance mode schedule remove {other['id']}` removes it")
    now = session.client.get("/admin/v1/mode")
    if now["window"] is not None and now["window"]["id"] == answer["id"]:
        until = "" if now["until_s"] is None else f", until {formats.moment(now['until_s'])}"
        output.say(f"note: it is that time already: the mode {mode_name(answer)} holds from now on{until}")


@box_command(app, "appliance mode schedule list", "appliance mode schedule list -o json", name="list")
def list_windows(session: Session) -> None:
    """List windows in the order they were made. If two begin together, the later one holds."""
    session.show(session.client.get("/admin/v1/mode/schedule"), _table)


@box_command(app, "appliance mode schedule remove win_4fG7kQ2x")
def remove(session: Session, window: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Remove a window. If it holds now, the mode that holds without it takes over at once."""
    answer = session.client.delete(f"/admin/v1/mode/schedule/{segment(window)}")
    session.show(answer, lambda removed: f"removed {removed['id']}")


@box_command(app, "appliance mode schedule preview", "appliance mode schedule preview --hours 168")
def preview(
    session: Session,
    hours: Annotated[float, typer.Option("--hours", min=1, max=744, help="How far to look ahead.")] = 24.0,
) -> None:
    """Show what will hold over the coming 24 hours, in this machine's local time."""
    session.show(session.client.get("/admin/v1/mode/schedule/preview", hours=hours), _timeline)


def described(window: dict[str, Any]) -> str:
    """A window in a few words."""
    end = ""
    if window["until"]:
        end = f' until "{window["until"]}"'
    elif window["for_s"]:
        end = f" for {formats.duration(window['for_s'])}"
    return f'{mode_name(window)} at "{window["cron"]}"{end} {window["tz"]}'


def mode_name(held: dict[str, Any]) -> str:
    return f"split --train {held['train_devices']}" if held["policy"] == "split" else held["policy"]


def _mode(text: str, train: int | None) -> tuple[str, int | None]:
    """The policy and the devices of a split. Raises BadUsage."""
    try:
        policy, *rest = shlex.split(text) or [""]
    except ValueError:
        policy, rest = text, []
    if policy not in _LETTERS:
        raise BadUsage(f'the mode is {text!r}; expected serve, train, auto or "split --train N"')
    if len(rest) == 1 and rest[0].startswith("--train="):
        rest = ["--train", rest[0].removeprefix("--train=")]
    if rest:
        if len(rest) != 2 or rest[0] != "--train" or not (rest[1].isascii() and rest[1].isdigit()) or train is not None:
            raise BadUsage(f'the mode is {text!r}; expected serve, train, auto or "split --train N"')
        train = int(rest[1])
    if (policy == "split") != (train is not None):
        needs = "the mode split needs --train N: how many devices training may have"
        raise BadUsage(needs if train is None else f"--train belongs to the mode split, not to {policy}")
    return policy, train


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "BEGINS", "ENDS", "ZONE", "MODE", ">FLOOR", "NEXT"),
        (
            (
                w["id"],
                w["cron"],
                w["until"] or (f"after {formats.duration(w['for_s'])}" if w["for_s"] else "-"),
                w["tz"],
                mode_name(w),
                w["serving_floor"],
                formats.moment(w["next_s"]),
            )
            for w in answer["data"]
        ),
        empty='no windows; `appliance mode schedule add "0 22 * * *" train --for 9h` makes one',
    )


def _timeline(answer: dict[str, Any]) -> Any:
    segments = answer["data"]
    begin_s, end_s = segments[0]["from_s"], segments[-1]["to_s"]
    cell_s = (end_s - begin_s) / _BAR_CELLS
    middles = [begin_s + (n + 0.5) * cell_s for n in range(_BAR_CELLS)]
    cells = [_LETTERS[next(s for s in segments if s["to_s"] > at_s)["policy"]] for at_s in middles]
    scale = time.strftime("%H:%M", time.localtime(begin_s)).ljust(_BAR_CELLS - 5) + time.strftime(
        "%H:%M", time.localtime(end_s)
    )
    legend = "  ".join(f"{letter} {name}" for name, letter in _LETTERS.items())
    rows = (
        (
            formats.moment(s["from_s"]),
            formats.moment(s["to_s"]),
            formats.duration(s["to_s"] - s["from_s"]),
            mode_name(s),
            s["serving_floor"],
            s["window"] or ("set by hand" + (f", instead of {s['overridden']}" if s["overridden"] else "")),
        )
        for s in segments
    )
    table = output.table(("FROM", "TO", ">LENGTH", "MODE", ">FLOOR", "BY"), rows, empty="nothing")
    return output.stack(f"{''.join(cells)}\n{scale}\n{legend}", table)
