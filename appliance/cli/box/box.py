"""`appliance up|down` and `gpu drain`: the box on this machine, and its devices."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from appliance.cli import formats, output
from appliance.cli.box.main_process import MainProcess, stop_box
from appliance.cli.command import CONFIG, Session, command, flag, number, opt
from appliance.cli.errors import CommandFailed, Said
from appliance.cli.local import DEVICES, devices_of, resolved
from appliance.cli.locate import BoxFile, data_dir_option
from appliance.cli.resources import segment
from appliance.cli.waiting import TIMEOUT, until


@command(
    "up",
    flag("-d --detach", "Leave it running in the background."),
    CONFIG,
    opt("--host ADDRESS", "Default: 127.0.0.1. Wider ones open once a key exists."),
    opt("--port PORT", "Default: 8000.", type=number(int, 1, 65535)),
    DEVICES,
    needs="here",
)
def up(session: Session, args: Namespace) -> None:
    """Start the box on this machine.

    Starts Ray, the scheduler and the gateway; shows the endpoint and, once, a first API key. Without a terminal it
    names the file that has the key (`first-key` in the data directory, yours alone). After a crash, the same command
    brings back jobs, models, keys and mode and continues the work.

    Examples:
      appliance up                              in the foreground; Ctrl-C stops it in order
      appliance up --detach                     in the background; returns when it answers
      appliance up --data-dir /srv/box --port 9000 --devices 4
      appliance up --config box.toml            see docs/operations.md for every key
    """
    devices = devices_of(args.devices)
    settings = resolved(args.config, data_dir=args.data_dir, host=args.host, port=args.port, devices=devices)
    folder = Path(settings.box.data_dir)
    process = MainProcess(settings.model_dump_json(), folder, detach=args.detach)
    came = [] if args.detach else _forward_signals(process)
    try:
        if args.detach:
            with output.progress("starting the box") as meter:
                announced = process.wait_until_ready(meter.update)
        else:
            announced = process.wait_until_ready(lambda message: None)
    except KeyboardInterrupt:
        process.stop()
        process.wait()
        raise
    except CommandFailed as error:
        if came:
            raise Said(130) from error
        raise
    file = announced.get("first_key_file")
    answer = {"url": announced["url"], "data_dir": str(folder), "first_key": _first_key(file), "first_key_file": file}
    session.show(answer, lambda shown: _ready(shown, args.detach))
    if not args.detach and (code := process.wait()) != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise CommandFailed(f"the box {how}; `appliance up` continues its work")


def _forward_signals(process: MainProcess) -> list[int]:
    """Makes every signal that would end us end the box in order instead; a second one kills it. Returns a list that
    each signal is added to."""
    came: list[int] = []

    def forward(signum: int, _frame: Any) -> None:
        came.append(signum)
        process.stop()

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, forward)
    return came


def _first_key(file: str | None) -> str | None:
    """The key, for a person at a terminal. Anything else that reads what we print may be a journal, which would keep
    it."""
    if file is None or not sys.stdout.isatty():
        return None
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None  # the answer names its file in any case


def _ready(answer: dict[str, Any], detached: bool) -> Any:
    page = f"{answer['url'].removesuffix('/v1')}/ui"
    shown = [("endpoint", answer["url"]), ("page", page), ("data", answer["data_dir"])]
    if answer["first_key"]:
        shown.append(("API key", f"{answer['first_key']}   (also in {answer['first_key_file']})"))
    elif answer["first_key_file"]:
        shown.append(("API key", f"in {answer['first_key_file']}"))
    shown.append(("stop", f"appliance down{data_dir_option(Path(answer['data_dir']))}" if detached else "Ctrl-C"))
    return output.above("The box is ready.", output.fields(*shown))


@command(
    "down",
    opt("--timeout SECONDS", "Then exit code 124.", type=number(float, 0), default=300.0),
    flag("--force", "Kill it; the next `up` continues from what was saved."),
    needs="here",
)
def down(session: Session, args: Namespace) -> None:
    """Stop the box on this machine.

    Requests finish, jobs are suspended, and what only memory holds is saved. Without a box it does nothing.

    Examples:
      appliance down
      appliance down --data-dir /srv/box
    """
    box = BoxFile.read(args.data_dir)
    with output.progress("stopping the box") as meter:
        ran = stop_box(box, timeout_s=args.timeout, kill=args.force, on_message=meter.update)
    note = BoxFile.read(box.data_dir).message if ran and not args.force else ""
    text = f"the box on {box.data_dir} {'was killed' if args.force else 'has stopped'}"
    answer = {"data_dir": str(box.data_dir), "ran": ran, "note": note}
    session.show(answer, lambda _: text if ran else f"no box runs on {box.data_dir}")
    if note:
        output.say(f"note: {note}")


@command(
    "gpu drain",
    opt("id DEVICE", "As `gpu list` names it, e.g. n0/3."),
    opt("--reason TEXT", "Shown in `gpu list` and in the audit log.", default=""),
    opt("--wait", "Return when no job or engine holds it (the default).", action="store_true", default=True),
    opt("--no-wait", "Return at once.", dest="wait", action="store_false"),
    TIMEOUT,
)
def drain(session: Session, args: Namespace) -> None:
    """Take a device out of use: its engine or job moves elsewhere without losing a request or a step.

    Drained devices stay so over restarts. Waiting may be interrupted: the box goes on. Exit code 124 if it takes
    longer than --timeout.

    Examples:
      appliance gpu drain n0/3 --reason "row remap pending"
      appliance gpu drain n0/3 --no-wait
    """
    device = session.client.post(f"/admin/v1/devices/{segment(args.id)}/drain", {"reason": args.reason})
    if args.wait and device["holder"] is not None:

        def now() -> dict[str, Any]:
            return next(
                (one for one in session.client.get("/admin/v1/devices")["data"] if one["id"] == args.id), device
            )

        device = until(
            now,
            lambda one: one["holder"] is None or one["drain"] is None,
            lambda one: (f"draining {args.id}: {formats.by_name('', one['holder'])} is leaving", None, None),
            args.timeout,
            f"draining {args.id}",
        )
    session.show(device, output.view)
