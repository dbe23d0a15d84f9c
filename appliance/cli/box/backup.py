"""`appliance backup` and `appliance restore`; the work is done by `appliance.backup.main`, never imported here."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, Format, examples, group
from appliance.cli.errors import CommandFailed
from appliance.cli.own_process import python, why_it_failed

app = group("Backups: copies of the box elsewhere, taken while it runs.")

PLACE = Annotated[
    str | None,
    typer.Argument(metavar="[PLACE]", help="A directory, or s3://bucket/prefix. Default: url in [backup]."),
]
KEY_FILE = Annotated[
    str | None,
    typer.Option("--key-file", metavar="FILE", help="With the key or passphrase. Default: key_file in [backup]."),
]
NAME = Annotated[str | None, typer.Option("--name", help="As `backup list` shows it. Default: the newest.")]


@app.command(
    epilog=examples(
        "appliance backup make /mnt/nas/box-1",
        "appliance backup make s3://backups/box-1 --keep 30",
        "appliance backup make                      to the url in [backup]: for a timer",
        "appliance backup make /mnt/nas/box-1 --key-file /etc/box/backup.key      encrypted",
        "",
        "The box may run. Only what is new since the last backup is written: what backups share is there once.",
        "A backup has the database, files, models and the jobs' snapshots: without a key file keep it as safe as",
        "the box. A place is encrypted from its first backup on, or never.",
    )
)
def make(
    place: PLACE = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="How many backups stay there. Default: keep in [backup], 14.")
    ] = None,
    secrets: Annotated[
        bool,
        typer.Option("--secrets", help="Include private keys: the authority for nodes, the first API key."),
    ] = False,
    key_file: KEY_FILE = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Take a backup of the box on this machine."""
    options = ["--keep", str(keep)] if keep is not None else []
    options += ["--secrets"] if secrets else []
    answer = in_process("make", place, config, data_dir, *options, key_file=key_file)
    show_result(answer, output_format, "taken", f"{formats.size(answer['new_bytes'])} of it new")


@app.command(
    name="list",
    epilog=examples("appliance backup list /mnt/nas/box-1", "appliance backup list -o json"),
)
def list_backups(
    place: PLACE = None,
    key_file: KEY_FILE = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """List the backups at a place, the oldest first."""
    answer = in_process("list", place, config, data_dir, key_file=key_file)
    if output_format == "json":
        output.print_json(answer)
        return
    for name in answer["damaged"]:
        output.say(f"the manifest of {name} cannot be read: it cannot be restored, nor any chunk deleted meanwhile")
    rows = (
        (made["name"], made["version"], made["files"], formats.size(made["bytes"]), formats.size(made["new_bytes"]))
        for made in answer["data"]
    )
    output.draw(
        output.table(
            ("NAME", "RELEASE", ">FILES", ">SIZE", ">NEW THEN"), rows, empty=f"no backups at {answer['where']}"
        )
    )


@app.command(
    epilog=examples(
        "appliance backup verify /mnt/nas/box-1",
        "appliance backup verify /mnt/nas/box-1 --name 2026-11-25T03-00-00Z",
    )
)
def verify(
    place: PLACE = None,
    name: NAME = None,
    key_file: KEY_FILE = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Read a whole backup to check that it can be restored."""
    answer = in_process("verify", place, config, data_dir, *named(name), key_file=key_file)
    show_result(answer, output_format, "whole", "every checksum and the database are right")


@app.command(
    epilog=examples(
        "appliance backup keygen /etc/box/backup.key",
        "",
        "A passphrase of 16 characters or more in a file of its own does as well. Keep a copy of either away from the",
        "box: without it nobody can restore its backups.",
    )
)
def keygen(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
    output_format: OUTPUT = "table",
) -> None:
    """Make a key for encrypted backups."""
    answer = in_process("keygen", None, None, None, "--to", str(Path(file).expanduser().resolve()))
    if output_format == "json":
        output.print_json(answer)
        return
    output.say(f"{answer['file']} has a new key: keep a copy away from the box, or its backups are lost with it")


def named(name: str | None) -> list[str]:
    return [] if name is None else ["--name", name]


def show_result(answer: dict[str, Any], output_format: Format, done: str, more: str) -> None:
    if output_format == "json":
        output.print_json(answer)
        return
    size = formats.size(answer["bytes"])
    output.say(f"{answer['name']} at {answer['where']} is {done}: {answer['files']} files, {size}; {more}")


def in_process(
    command: str,
    place: str | None,
    config: Path | None,
    data_dir: str | None,
    *options: str,
    key_file: str | None = None,
) -> dict[str, Any]:
    """What the process answers, while a line shows how far it is. Raises BadUsage, CommandFailed."""
    settings = resolved(config, data_dir=data_dir)
    given = {}
    if place is not None:
        given["url"] = place if place.startswith("s3://") else str(Path(place).expanduser().resolve())
    if key_file is not None:
        given["key_file"] = str(Path(key_file).expanduser().resolve())
    settings = settings.model_copy(update={"backup": settings.backup.model_copy(update=given)})
    arguments = python("appliance.backup.main", command, "--config-json", settings.model_dump_json(), *options)
    answer: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            with output.progress("restore" if command == "restore" else f"backup {command}") as meter:
                for line in process.stdout or ():
                    news = json.loads(line)
                    answer = news.get("answer", answer)
                    if "done" in news:
                        meter.update(done=news["done"], total=news["of"])
            if process.wait() != 0:
                errors.seek(0)
                raise CommandFailed(why_it_failed(errors.read(), process.returncode))
            return answer
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
