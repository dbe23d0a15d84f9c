"""`appliance restore`: a backup comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import formats, output
from appliance.cli.box.backup import PLACE, opened, show
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group

app = group("Bring a backup back, on this machine or another one.")


@app.command(
    epilog=examples(
        "appliance restore /mnt/nas/box-1 --data-dir /srv/box",
        "appliance restore s3://backups/box-1 --name 2026-11-25T03-00-00Z --data-dir /srv/box",
        "appliance up --data-dir /srv/box           then starts it: keys, models, files and jobs are as they were",
        "",
        "The directory is empty or not there, and appears whole. Other nodes have to join again.",
    )
)
def restore(
    place: PLACE = None,
    name: Annotated[str | None, typer.Option("--name", help="As `backup list` shows it. Default: the newest.")] = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Bring a backup back, on this machine or another one."""
    settings = resolved(config, data_dir=data_dir)
    with opened(settings, place) as objects, output.progress("restore") as meter:
        from appliance.backup import restore
        from appliance.paths import BoxPaths

        target = BoxPaths.of(Path(settings.box.data_dir)).data_dir
        found = restore(objects, name, target, report=lambda done, of: meter.update(done=done, total=of))
    show(found, objects.where, output_format, "restored", "`appliance up` with this --data-dir starts the box")
    if output_format != "json":
        output.say(
            f"note: keys that were revoked or rotated, and people who were forgotten, after "
            f"{formats.moment(found.made_s)} are back as they were then: see `appliance key list`"
        )
