"""`appliance backup`: copies of the box elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli import formats, output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, Format, examples, group
from appliance.cli.errors import CommandFailed

if TYPE_CHECKING:
    from appliance.backup import Manifest
    from appliance.config import BoxConfig
    from weights.tiers.objects import Objects

app = group("Backups: copies of the box elsewhere, taken while it runs.")

PLACE = Annotated[
    str | None,
    typer.Argument(metavar="[PLACE]", help="A directory, or s3://bucket/prefix. Default: url in [backup]."),
]


@app.command(
    epilog=examples(
        "appliance backup make /mnt/nas/box-1",
        "appliance backup make s3://backups/box-1 --keep 30",
        "appliance backup make                      to the url in [backup]: for a timer",
        "",
        "The box may run. Only what is new since the last backup is written: what backups share is there once.",
        "A backup has the database, files, models and the jobs' snapshots, not encrypted, and no private keys.",
    )
)
def make(
    place: PLACE = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="How many backups stay there. Default: keep in [backup], 14.")
    ] = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Take a backup of the box on this machine."""
    settings = resolved(config, data_dir=data_dir)
    with opened(settings, place) as objects, output.progress("backup make") as meter:
        from appliance.backup import take
        from appliance.paths import BoxPaths

        os.nice(10)
        made = take(
            BoxPaths.of(Path(settings.box.data_dir)),
            objects,
            keep=settings.backup.keep if keep is None else keep,
            report=lambda done, of: meter.update(done=done, total=of),
        )
    show(made, objects.where, output_format, "taken", f"{formats.size(made.new_bytes)} of it new")


@app.command(name="list", epilog=examples("appliance backup list /mnt/nas/box-1", "appliance backup list -o json"))
def list_backups(
    place: PLACE = None, config: CONFIG = None, data_dir: DATA_DIR = None, output_format: OUTPUT = "table"
) -> None:
    """List the backups at a place, the oldest first."""
    with opened(resolved(config, data_dir=data_dir), place) as objects:
        from appliance.backup import names, read

        found = [read(objects, name) for name in names(objects)]
    if output_format == "json":
        output.print_json({"data": [_fields(made) for made in found], "where": objects.where})
        return
    rows = ((made.name, len(made.files), formats.size(made.bytes), formats.size(made.new_bytes)) for made in found)
    output.draw(output.table(("NAME", ">FILES", ">SIZE", ">NEW THEN"), rows, empty=f"no backups at {objects.where}"))


@contextmanager
def opened(settings: BoxConfig, place: str | None) -> Iterator[Objects]:
    """The place to use; errors of backups in the block become CommandFailed."""
    from appliance.backup import BackupError
    from weights.format.errors import WeightsError
    from weights.tiers.objects import objects_at

    if place is not None and not place.startswith("s3://"):
        place = str(Path(place).expanduser().resolve())
    url = place or settings.backup.url
    if url is None:
        raise CommandFailed("no place for backups: name one, or set url in [backup]")
    if not url.startswith("s3://") and not Path(url).is_dir():
        raise CommandFailed(f"{url} is not a directory; is it mounted? A directory for backups must exist")
    try:
        yield objects_at(settings.backup.model_copy(update={"url": url}))
    except (BackupError, WeightsError, OSError) as error:
        raise CommandFailed(str(error)) from error


def _fields(found: Manifest) -> dict[str, object]:
    return {**asdict(found), "files": len(found.files), "bytes": found.bytes}


def show(found: Manifest, where: str, output_format: Format, done: str, more: str) -> None:
    if output_format == "json":
        output.print_json({**_fields(found), "where": where})
        return
    output.say(f"{found.name} at {where} is {done}: {len(found.files)} files, {formats.size(found.bytes)}; {more}")
