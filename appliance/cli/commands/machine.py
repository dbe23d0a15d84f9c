"""`appliance init|doctor|restore` and `backup make|list`: what runs on the box's own machine, whether the box runs or
not."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli import output
from appliance.cli.command import Session, command
from appliance.cli.errors import CommandFailed, Ended
from appliance.cli.locate import BoxFile, python, resolved
from appliance.cli.options import CONFIG, flag, number, opt
from appliance.paths import BoxPaths

if TYPE_CHECKING:
    from appliance.backup import Manifest
    from appliance.config import BoxConfig
    from weights.tiers.objects import Objects


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

    It takes a second, no device and no privilege; the box may run or not. Exit code: 0 all is well, 1 something
    fails, 2 something is to be looked at.

    Examples:
      appliance doctor --all                     every check, with what was measured
      appliance doctor -o json                   for scripts
      appliance doctor --send-test               do alerts reach somebody?
    """
    settings = resolved(args.config, data_dir=args.data_dir)
    runs = BoxFile.read(settings.box.data_dir).pid is not None
    if runs and args.config is None:  # it may have been started with other options
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

    The box may run. Only what is new since the last backup is written: what backups share is there once.
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

    The directory is empty or not there, and appears whole. Other nodes have to join again.

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
    """The configuration, and the place of backups; their errors in the block become CommandFailed."""
    settings = resolved(args.config, data_dir=args.data_dir)
    from appliance.backup import BackupError
    from weights.format.errors import WeightsError
    from weights.tiers.objects import objects_at

    place = args.place or settings.backup.url
    if place is None:
        raise CommandFailed("no place for backups: name one, or set url in [backup]")
    if not place.startswith("s3://"):
        place = str(Path(place).expanduser().resolve())
        if not Path(place).is_dir():
            raise CommandFailed(
                f"{place} is not a directory. Create it with mkdir; the box does not, in case a disk is unmounted"
            )
    try:
        yield settings, objects_at(settings.backup.model_copy(update={"url": place}))
    except (BackupError, WeightsError, OSError) as error:
        raise CommandFailed(str(error)) from error


def _backup_fields(found: Manifest) -> dict[str, Any]:
    return {**asdict(found), "files": len(found.files), "bytes": found.bytes}


def _show_backup(session: Session, found: Manifest, where: str, done: str, more: str) -> None:
    size = f"{len(found.files):,} files, {output.size(found.bytes)}"
    text = f"{found.name} at {where} is {done}: {size}; {more}"
    session.show({**_backup_fields(found), "where": where}, lambda _: text)
