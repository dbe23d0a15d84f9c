"""`appliance up`, `down` and `status`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.box.gpu import health, holder
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, EVERY, OUTPUT, WATCH, Session, box_command, examples, group
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs.job import jobs_table
from appliance.cli.locate import BoxFile, data_dir_option
from appliance.cli.mode.history import handover_steps
from appliance.cli.mode.power import limit_line
from appliance.cli.own_process import python
from appliance.paths import BoxPaths
from runtime.replace_file import replace_file

_STOP_S = 300.0


app = group("The box itself.")


@app.command(
    epilog=examples(
        "appliance up                              in the foreground; Ctrl-C stops it in order",
        "appliance up --detach                     in the background; returns when it answers",
        "appliance up --data-dir /srv/box --port 9000 --devices 4",
        "appliance up --config box.toml            see docs/operations.md for every key",
        "",
        "After a crash, the same command brings back jobs, models, keys and mode and continues the work.",
    )
)
def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running in the background.")] = False,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Default: 127.0.0.1. Wider ones open once a key exists.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Default: 8000.")] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="auto|N", help="auto: every GPU, else 8 CPU devices; N: N CPU devices."),
    ] = None,
    output_format: OUTPUT = "table",
) -> None:
    """Start the box on this machine.

    Starts Ray, the scheduler and the gateway; shows the endpoint and, once, a first API key. Without a terminal it
    names the file that has the key (`first-key` in the data directory, yours alone).
    """
    from appliance.cli.box.up import MainProcess  # fenced, for the time of `--help`

    settings = resolved(config, data_dir=data_dir, host=host, port=port, devices=_devices(devices))
    folder = Path(settings.box.data_dir)
    process = MainProcess(settings.model_dump_json(), folder, detach=detach)
    asked_to_stop = [] if detach else _forward_signals(process)
    try:
        with output.progress("starting the box") if detach else output.quiet() as meter:
            announced = process.wait_until_ready(meter.update)
    except KeyboardInterrupt:
        process.stop()
        process.wait()
        raise
    except CommandFailed as error:
        if asked_to_stop:
            raise typer.Exit(130) from error
        raise
    file = announced.get("first_key_file")
    answer = {"url": announced["url"], "data_dir": str(folder), "first_key": _first_key(file), "first_key_file": file}
    if output_format == "json":
        output.print_json(answer)
    else:
        output.draw(_ready(answer, detach))
    if not detach:
        _stay(process)


@app.command(
    epilog=examples(
        "appliance join n1.json",
        "appliance join n1.json --data-dir /srv/node --devices 4",
        "",
        "On the box: set node_address in [box], start it with `appliance up`, and call `appliance node invite`.",
        "All that nodes say to each other is encrypted, and each shows the certificate of its invitation.",
        "Ctrl-C: the box moves what runs here elsewhere, then this machine leaves; a second one ends it at once.",
    )
)
def join(
    invitation: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="What `appliance node invite` printed.")
    ],
    data_dir: DATA_DIR = None,
    devices: Annotated[str | None, typer.Option("--devices", metavar="auto|N")] = None,
) -> None:
    """Give this machine's devices to a box that runs on another machine; in the foreground until Ctrl-C."""
    settings = resolved(None, data_dir=data_dir, devices=_devices(devices))
    paths = BoxPaths.of(Path(settings.box.data_dir))
    paths.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(paths.config_file, settings.model_dump_json().encode())
    command = python("appliance.boot.node", "--config", str(paths.config_file))
    os.execv(sys.executable, [*command, "--invitation", str(invitation.resolve())])


@app.command(epilog=examples("appliance down", "appliance down --data-dir /srv/box"))
def down(
    data_dir: DATA_DIR = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Give up waiting then, with exit code 124.")
    ] = _STOP_S,
    force: Annotated[
        bool, typer.Option("--force", help="Kill it; the next `up` continues from what was saved.")
    ] = False,
) -> None:
    """Stop the box on this machine.

    Requests finish, jobs are suspended, and what only memory holds is saved. Without a box it does nothing.
    """
    from appliance.cli.box.up import stop_box

    box = BoxFile.read(data_dir)
    with output.progress("stopping the box") as meter:
        ran = stop_box(box, timeout_s=timeout, kill=force, on_message=meter.update)
    if not ran:
        print(f"no box runs on {box.data_dir}")
        return
    left = BoxFile.read(box.data_dir)
    print(f"the box on {box.data_dir} {'was killed' if force else 'has stopped'}")
    if not force and left.message:
        output.say(f"note: {left.message}")


@box_command(app, "appliance status", "appliance status --watch", "appliance status -o json")
def status(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Show the box at a glance.

    Mode, devices, replicas, jobs, memory, and the hand-over that is going on.
    """
    session.follow(lambda: session.client.get("/admin/v1/status"), _status, watch, every)


def _devices(text: str | None) -> str | int | None:
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        raise BadUsage(f"--devices is {text!r}; expected auto or a number of logical CPU devices")
    return int(text)


def _forward_signals(process: Any) -> list[int]:
    """Makes every signal that would end us end the box in order instead; a second one kills it. Returns a list that
    each signal is added to."""
    came: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        came.append(number)
        process.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    return came


def _stay(process: Any) -> None:
    """Returns when the box ends in order. Raises CommandFailed if it does not."""
    code = process.wait()
    if code != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise CommandFailed(f"the box {how}; `appliance up` continues its work")


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


def _status(now: dict[str, Any]) -> Any:
    box, mode, memory = now["box"], now["mode"], now["memory"]
    split = mode["train_devices"]
    lost = sum(device["health"] == "lost" for device in now["devices"])
    busy = sum(device["holder"] is not None for device in now["devices"])
    about = output.fields(
        ("box", f"{box['id']}, version {box['version']}, up for {formats.duration(time.time() - box['started_s'])}"),
        ("endpoint", box["url"]),
        ("data", box["data_dir"]),
        ("mode", mode["policy"] + ("" if split is None else f", {split} devices for training at most")),
        *([("power", limit_line(now["power"]))] if now["power"].get("set") else []),
        ("devices", f"{busy} of {len(now['devices']) - lost} held{f', {lost} lost' if lost else ''}"),
        ("backup", _backup(box.get("backup"))),
        ("weights", f"{formats.size(memory['used_bytes'])} in shared memory, at most {_budget(memory)}"),
    )
    devices = output.table(
        ("DEVICE", "KIND", "HEALTH", "HOLDER"),
        ((d["id"], d["kind"], health(d), holder(d)) for d in now["devices"]),
        empty="no devices",
    )
    replicas = output.table(
        ("REPLICA", "MODEL", "VERSION", "STATE", ">DEVICES", ">REQUESTS", ">MEMORY"),
        (
            (
                *formats.cells(r, "id model version state"),
                len(r["devices"]),
                r["inflight"],
                formats.size(r["rss_bytes"]) if r["rss_bytes"] else "-",
            )
            for r in now["replicas"]
        ),
        empty=f"no replicas: {'see below' if now.get('troubles') else 'a model starts when it is asked for'}",
    )
    jobs = jobs_table({"data": now["jobs"]}) if now["jobs"] else "no unfinished jobs"
    handover = handover_steps(now["handover"]) if now["handover"] else None
    notes = [*map(_trouble, now.get("degraded") or ()), *(now.get("notes") or ())]
    return output.stack(about, devices, replicas, jobs, handover, output.notes(notes))


def _backup(last: dict[str, Any] | None) -> str:
    if last is None:
        return "none yet (`appliance backup make --help`)"
    return f"{formats.duration(max(0.0, time.time() - last['made_s']))} ago at {last['where']}"


def _trouble(degraded: dict[str, Any]) -> str:
    """One thing that the box cannot do now, and goes on trying."""
    since = formats.duration(max(0.0, time.time() - degraded["since_s"]))
    tries = f"{degraded['failures']} time{'s' * (degraded['failures'] != 1)}"
    return f"degraded: {degraded['name']} failed {tries} since {since} ago ({degraded['why']}); it is tried again"


def _budget(memory: dict[str, Any]) -> str:
    return "what is free" if memory["budget_bytes"] is None else formats.size(memory["budget_bytes"])
