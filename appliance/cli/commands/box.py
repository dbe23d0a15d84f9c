"""The box on this machine, its devices, mode and nodes: `appliance up|down|join|init|doctor|restore`, `gpu drain`,
`mode set|history`, `node invite|remove` and `backup make|list`."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli import output
from appliance.cli.command import TIMEOUT, WAIT, Session, command, until
from appliance.cli.errors import BadUsage, CommandFailed, Conflict, Ended
from appliance.cli.locate import BoxFile, data_dir_option, look_for_all, python, resolved
from appliance.cli.options import CONFIG, DATA_DIR, DEVICES, existing_file, flag, number, opt
from appliance.cli.resources import MODE, POLICY, draw_handover, draw_mode, limit, mode_fields, segment
from appliance.paths import BoxPaths, UnsafeFolder, check_closed
from weights.format.names import replace_file

if TYPE_CHECKING:
    from appliance.backup import Manifest
    from appliance.config import BoxConfig
    from weights.tiers.objects import Objects

MODE_WAIT_S = 900.0
_ANSWER_MARGIN_S = 30.0
_HANDOVERS = "id ?began=started_s reason state >time=seconds ?>bytes >steps:total ?asked_by ?error"
_LOOK_EVERY_S = 0.1
_TAIL_BYTES = 3000
_OF_A_BOX = {"appliance.db", "appliance.toml", "box.json", "logs"}
"""One of these is in a directory where a box has run, has been configured or was restored."""


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
      appliance up --detach                     in the background; returns when it answers
      appliance up --data-dir /srv/box --port 9000 --devices 4
      appliance up --config box.toml            see docs/operations.md for every key
    """
    settings = resolved(args.config, args.devices, data_dir=args.data_dir, host=args.host, port=args.port)
    folder = Path(settings.box.data_dir)
    _check_folder(folder)
    paths = BoxPaths.of(folder)
    paths.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    replace_file(paths.config_file, settings.model_dump_json().encode())
    command = python("appliance.boot.main", "up", "--config", str(paths.config_file))
    if not args.detach:
        os.chdir(folder)
        os.execv(sys.executable, [*command, "--show", args.output])
    log = os.open(paths.logs / "main.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    os.close(log)
    try:
        show_ready(session, _started(process, folder), detached=True)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _check_folder(data_dir: Path) -> None:
    """Raises Conflict if a box runs there, CommandFailed for a foreign directory or one writable by others."""
    running = BoxFile.read(data_dir)
    if running.pid is not None:
        raise _runs_already(data_dir, f" ({running.state}, {running.fields.get('url')}, pid {running.pid})")
    if not data_dir.exists():
        return
    inside = {path.name for path in data_dir.iterdir()}
    if inside - {"lost+found"} and not inside & _OF_A_BOX:
        raise CommandFailed(f"{data_dir} is not empty and not a box's; name an empty directory, or a new one")
    try:
        check_closed(data_dir)  # checked before chmod, which would not undo other users' files
    except UnsafeFolder as error:
        raise CommandFailed(str(error)) from error


def _runs_already(data_dir: Path, known: str = "") -> Conflict:
    down = f"appliance down{data_dir_option(data_dir)}"
    return Conflict(f"a box runs on {data_dir} already{known}; `{down}` stops it")


def _started(process: subprocess.Popen[bytes], data_dir: Path) -> BoxFile:
    """Wait until the box is ready. Raises CommandFailed or Conflict if its process ends earlier."""
    with output.progress("starting the box") as meter:
        while (code := process.poll()) is None:
            box = BoxFile.read(data_dir)
            if box.fields.get("pid") == process.pid:
                if box.state == "ready":
                    return box
                meter(box.message or None)
            time.sleep(_LOOK_EVERY_S)
    if code == Conflict.exit_code:
        raise _runs_already(data_dir)
    box, log = BoxFile.read(data_dir), data_dir / "logs" / "main.log"
    if box.state == "failed":
        raise CommandFailed(f"the box did not start: {box.message}")
    text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    raise CommandFailed(f"the box did not start (exit code {code}); {log} ends with:\n{text}")


def show_ready(session: Session, box: BoxFile, *, detached: bool) -> None:
    """Print the endpoint and the first API key that the box made."""
    file, data_dir, url = box.fields.get("first_key_file"), str(box.data_dir), f"{box.fields['url']}/v1"
    # The key is printed only on a terminal: a log would store it.
    key = Path(file).read_text().strip() if file and sys.stdout.isatty() else None
    shown = {
        "endpoint": url,
        "page": f"{box.fields['url']}/ui",
        "data": data_dir,
        "API key": f"{key}   (also in {file})" if key else f"in {file}" if file else None,
        "stop": f"appliance down{data_dir_option(box.data_dir)}" if detached else "Ctrl-C",
    }
    answer = {"url": url, "data_dir": data_dir, "first_key": key, "first_key_file": file}
    session.show(answer, lambda _: output.stack("The box is ready.", output.view(shown), gap=False))


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
      appliance down --data-dir /srv/box
    """
    box = BoxFile.read(args.data_dir)
    pid = box.pid
    if pid is not None:
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL if args.force else signal.SIGTERM)
        until(
            lambda: BoxFile.read(box.data_dir),
            lambda _: select.select([handle], [], [], 0)[0],
            lambda now: (now.message or "stopping the box", None, None),
            args.timeout,
            f"stopping the box on {box.data_dir} (`appliance down{data_dir_option(box.data_dir)} --force` kills it)",
        )
    note = BoxFile.read(box.data_dir).message if pid is not None and not args.force else ""
    text = f"the box on {box.data_dir} {'was killed' if args.force else 'has stopped'}"
    answer = {"data_dir": str(box.data_dir), "ran": pid is not None, "note": note}
    session.show(answer, lambda shown: text if shown["ran"] else f"no box runs on {box.data_dir}")
    if note:
        output.say(f"note: {note}")


@command(
    "gpu drain",
    opt("id DEVICE", "As `gpu list` names it, e.g. n0/3."),
    opt("--reason TEXT", "Shown in `gpu list` and in the audit log.", default=""),
    *WAIT,
    TIMEOUT,
)
def drain(session: Session, args: Namespace) -> None:
    """Take a device out of use: its engine or job moves elsewhere without losing a request or a step.

    Drained devices stay so over restarts. Waiting may be interrupted: the box goes on. Exit code 124 if it takes
    longer than --timeout.

    Examples:
      appliance gpu drain n0/3 --reason "row remap pending"
    """

    def now() -> dict[str, Any]:
        return next(one for one in session.client.get("/admin/v1/devices")["data"] if one["id"] == args.id)

    device = session.client.post(f"/admin/v1/devices/{segment(args.id)}/drain", {"reason": args.reason})
    if args.wait:
        device = until(
            now,
            lambda one: one["holder"] is None or one["drain"] is None,
            lambda one: (f"draining {args.id}: {output.by_name('', one['holder'])} is leaving", None, None),
            args.timeout,
            f"draining {args.id}",
        )
    session.show(device)


@command(
    "mode set",
    POLICY,
    *MODE,
    *WAIT,
    opt("--timeout SECONDS", "Then exit code 124.", type=number(float, 1, MODE_WAIT_S), default=MODE_WAIT_S),
)
def set_mode(session: Session, args: Namespace) -> None:
    """Move devices between serving and training. No request is dropped and no job loses a step.

    It holds until it is set again, or until a window of `mode schedule` begins or ends, and survives restarts.
    Waiting may be interrupted: the box goes on.

    Examples:
      appliance mode set serve                 every device serves; jobs are suspended and wait
      appliance mode set train --floor 1       jobs get every device but one, which keeps serving
      appliance mode set split --train 6       six devices for jobs, the others serve
      appliance mode set auto                  training takes what serving does not need, and gives it back
    """
    body, query = mode_fields(args, (POLICY, *MODE)), {"wait": True, "timeout_s": args.timeout} if args.wait else None
    with output.progress(f"mode {args.policy}: the devices move"):
        answer = session.client.send(
            "PUT", "/admin/v1/mode", body=body, query=query, timeout_s=args.timeout + _ANSWER_MARGIN_S
        )
    session.show(answer, draw_mode)


@command("mode history", opt("id ID", "Only this one.", nargs="?"), limit(10))
def history(session: Session, args: Namespace) -> None:
    """Show hand-overs of devices with their bytes, seconds and who asked for them; with an ID also the steps.

    Examples:
      appliance mode history --limit 3
      appliance mode history 42                  one of them, with its details
    """
    if args.id is not None:
        session.show(session.client.get(f"/admin/v1/handovers/{segment(args.id)}"), draw_handover)
    else:
        answer = session.client.get("/admin/v1/handovers", limit=args.limit)
        session.show(answer, lambda page: output.listing(_HANDOVERS, page["data"], empty="no hand-overs yet"))


def _invitation(args: Namespace, act: str, *words: str) -> Any:
    """Call a function of `appliance.invitation` on the box that the options name. Raises CommandFailed."""
    look_for_all()
    from appliance import invitation

    try:
        return getattr(invitation, act)(BoxPaths.of(BoxFile.read(args.data_dir).data_dir), *words)
    except invitation.InvitationError as error:
        raise CommandFailed(str(error)) from error


@command(
    "node invite",
    opt("node NAME", "Its devices are then called NAME/0, NAME/1, ..."),
    opt("address ADDRESS", "Its own on the network of the nodes."),
    DATA_DIR,
    needs="",
)
def invite(session: Session, args: Namespace) -> None:
    """Print an invitation, with which one machine can join.

    For the user who runs the box, on its machine. Whoever has the file can join as that machine: it is for the
    eyes of its owner alone. The same file serves each time that the machine joins.

    Examples:
      appliance node invite n1 10.0.0.6 > n1.json      then, on that machine: appliance join n1.json
    """
    if sys.stdout.isatty():
        line = f"appliance node invite {args.node} {args.address} > FILE"
        raise BadUsage(f"an invitation has secrets; write it to a file: {line}")
    invitation = _invitation(args, "invite", args.node, args.address)
    if stat.S_ISREG(os.fstat(1).st_mode):
        os.fchmod(1, 0o600)  # the shell created the file readable by others
    print(invitation.text())


@command("node remove", opt("node NODE", "The first part of its devices' names, e.g. n1."), needs="here")
def remove(session: Session, args: Namespace) -> None:
    """Take a node out of the box at once: its Ray ends, and again whenever it joins, until it is invited again.

    For the user who runs the box, on its machine. Whoever took the machine over can still speak to Ray with its
    certificate: against that, make a new authority (docs/operations.md, More nodes).

    Examples:
      appliance node remove n1
    """
    _invitation(args, "remove", args.node)
    text = f"{args.node} is removed; `appliance node invite` lets a machine of this name join again"
    session.show({"id": args.node, "removed": True}, lambda _: text)


@command(
    "join", opt("file FILE", "What `appliance node invite` printed.", type=existing_file), DATA_DIR, DEVICES, needs=""
)
def join(session: Session, args: Namespace) -> None:
    """Give this machine's devices to a box that runs on another machine; in the foreground until Ctrl-C.

    On the box: set node_address in [box], start it with `appliance up`, and call `appliance node invite`.
    All that nodes say to each other is encrypted, and each shows the certificate of its invitation.
    Ctrl-C: the box moves what runs here elsewhere, then this machine leaves; a second one ends it at once.

    Examples:
      appliance join n1.json --data-dir /srv/node --devices 4
    """
    settings = resolved(None, args.devices, data_dir=args.data_dir)
    folder = Path(settings.box.data_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config_file = folder / "node.json"  # a box may run here by mistake; its directory must not serve as a node's
    replace_file(config_file, settings.model_dump_json().encode())
    process = python("appliance.boot.node", "--config", str(config_file))
    os.execv(sys.executable, [*process, "--invitation", str(args.file.resolve())])


@command(
    "init",
    opt("--template", "4 devices, 8, or 32 on four machines.", choices=("light", "box", "enterprise"), required=True),
    needs="",
)
def init(session: Session, args: Namespace) -> None:
    """Print a configuration to begin from, with a reason next to every line.

    `appliance up` reads appliance.toml in the data directory by itself.

    Examples:
      appliance init --template light > ~/.local/share/appliance/appliance.toml     4 devices, one team
      appliance init --template box > /etc/box/appliance.toml && appliance up --config /etc/box/appliance.toml
    """
    print((resources.files("appliance") / "templates" / f"{args.template}.toml").read_text(), end="")


@command(
    "doctor",
    flag("--all", "Show the checks that are right too."),
    flag("--send-test", "Send a test message to the receivers of [alerts] instead."),
    CONFIG,
    needs="here",
)
def doctor(session: Session, args: Namespace) -> None:
    """Check whether this machine is fit for the box, and whether the box is well.

    It takes a second, no device and no privilege; the box may run or not. Exit code: 0 all is well, 1 a check
    fails, 2 a check warns.

    Examples:
      appliance doctor --all                     every check, with what was measured
      appliance doctor -o json                   for scripts
      appliance doctor --send-test               are alerts delivered?
    """
    settings = resolved(args.config, data_dir=args.data_dir)
    runs = BoxFile.read(settings.box.data_dir).pid is not None
    if runs and args.config is None:  # a running box may have started with other options
        from appliance.config import load_resolved

        settings = load_resolved(BoxPaths.of(Path(settings.box.data_dir)).config_file)
    if args.send_test:
        _send_test(session, settings)
        return
    line = python("appliance.boot.doctor", "--config", "/dev/stdin", *(["--runs"] if runs else []))
    done = subprocess.run(line, input=settings.model_dump_json(), capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"the doctor did not end: {done.stderr.strip()[-300:]}")
    answer = json.loads(done.stdout)
    shown = [one for one in answer["data"] if args.all or one["state"] in ("warn", "fail")]
    columns = "state check found wanted do=remedy"
    session.show(answer, lambda _: output.listing(columns, shown, empty="nothing is wrong"))
    raise Ended(answer["exit_code"])


def _send_test(session: Session, settings: BoxConfig) -> None:
    if not settings.alerts.is_on:
        raise CommandFailed("[alerts] names no receiver: set webhook or email in appliance.toml (docs/operations.md)")
    from appliance.alerts import Message, Undelivered, channels, send

    failures: list[str] = []
    for channel in channels(settings.alerts):
        try:
            send(settings.alerts, channel, Message("test", "test", "This is a test."), settings.public_url)
        except Undelivered as error:
            failures.append(str(error))
    if failures:
        raise CommandFailed(f"not delivered: {'; '.join(failures)}")
    receivers = [*filter(None, [settings.alerts.webhook]), *settings.alerts.email]
    session.show({"sent_to": receivers}, lambda _: f"sent to {', '.join(receivers)}")


_WHERE = opt("place PLACE", "A directory, or s3://bucket/prefix. Default: url in [backup].", nargs="?")


@command(
    "backup make",
    _WHERE,
    opt("--keep N", "How many backups stay there. Default: keep in [backup], 14.", type=number(int, 1)),
    CONFIG,
    needs="here",
)
def make(session: Session, args: Namespace) -> None:
    """Take a backup of the box on this machine.

    The box may run. Only what is new since the last backup is written; backups share the rest.
    A backup has the database, files, models and the jobs' snapshots, not encrypted, and no private keys.

    Examples:
      appliance backup make /mnt/nas/box-1
      appliance backup make                      to the url in [backup]: for a timer
    """
    with _place(args) as (settings, objects), output.progress("backup make") as meter:
        from appliance.backup import take

        os.nice(10)
        keep = settings.backup.keep if args.keep is None else args.keep
        paths = BoxPaths.of(Path(settings.box.data_dir))
        made = take(paths, objects, keep=keep, report=lambda done, of: meter(None, done, of))
    _show_backup(session, made, objects.where, "taken", f"{output.size(made.new_bytes)} of it new")


@command("backup list", _WHERE, CONFIG, needs="here")
def list_backups(session: Session, args: Namespace) -> None:
    """List the backups at a place, the oldest first.

    Examples:
      appliance backup list /mnt/nas/box-1
    """
    with _place(args) as (_, objects):
        from appliance.backup import names, read

        found = [_backup_fields(read(objects, name)) for name in names(objects)]
    columns, empty = "name >files >size=bytes >new_then=new_bytes", f"no backups at {objects.where}"
    session.show({"data": found, "where": objects.where}, lambda _: output.listing(columns, found, empty=empty))


@command("restore", _WHERE, opt("--name NAME", "As `backup list` shows it. Default: the newest."), CONFIG, needs="here")
def restore(session: Session, args: Namespace) -> None:
    """Bring a backup back, on this machine or another one.

    The data directory must be empty or absent; it appears when all is restored. Other nodes have to join again.

    Examples:
      appliance restore /mnt/nas/box-1 --data-dir /srv/box
      appliance restore s3://backups/box-1 --name 2026-11-25T03-00-00Z --data-dir /srv/box
      appliance up --data-dir /srv/box           then starts it: keys, models, files and jobs are as they were
    """
    with _place(args) as (settings, objects), output.progress("restore") as meter:
        from appliance.backup import restore

        target = BoxPaths.of(Path(settings.box.data_dir)).data_dir
        found = restore(objects, args.name, target, report=lambda done, of: meter(None, done, of))
    _show_backup(session, found, objects.where, "restored", "`appliance up` with this --data-dir starts the box")
    output.say(
        f"note: keys that were revoked or rotated, and people who were forgotten, after "
        f"{output.moment(found.made_s)} are back as they were then: see `appliance key list`"
    )


@contextmanager
def _place(args: Namespace) -> Iterator[tuple[BoxConfig, Objects]]:
    """Yield the configuration and the backups' storage; their errors in the block become CommandFailed."""
    settings = resolved(args.config, data_dir=args.data_dir)
    from appliance.backup import BackupError
    from weights.format.errors import WeightsError
    from weights.tiers.objects import objects_at

    place = args.place or settings.backup.url
    if place is None:
        raise CommandFailed("no place for backups: name one, or set url in [backup]")
    if not place.startswith("s3://"):
        place = str(Path(place).expanduser().resolve())
    try:
        yield settings, objects_at(settings.backup.model_copy(update={"url": place}))
    except (BackupError, WeightsError, OSError) as error:
        raise CommandFailed(str(error)) from error


def _backup_fields(manifest: Manifest) -> dict[str, Any]:
    return {**asdict(manifest), "files": len(manifest.files), "bytes": manifest.bytes}


def _show_backup(session: Session, manifest: Manifest, where: str, done: str, more: str) -> None:
    size = f"{len(manifest.files):,} files, {output.size(manifest.bytes)}"
    text = f"{manifest.name} at {where} is {done}: {size}; {more}"
    session.show({**_backup_fields(manifest), "where": where}, lambda _: text)
