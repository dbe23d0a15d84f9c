"""`appliance restore`: a backup comes back."""

from __future__ import annotations

from typing import Any

from appliance.cli import formats, output
from appliance.cli.box.backup import KEY_FILE, NAME, PLACE, in_process, named, show_result
from appliance.cli.box.local import CONFIG
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group

app = group("Bring a backup back, on this machine or another one.")


@app.command(
    epilog=examples(
        "appliance restore /mnt/nas/box-1 --data-dir /srv/box",
        "appliance restore s3://backups/box-1 --name 2026-11-25T03-00-00Z --data-dir /srv/box",
        "appliance restore /mnt/nas/box-1 --key-file backup.key --data-dir /srv/box      an encrypted one",
        "appliance up --data-dir /srv/box           then starts it: keys, models, files and jobs are as they were",
        "",
        "The directory is empty or not there, and appears whole. Other nodes have to join again, unless --secrets was",
        "given when the backup was taken.",
    )
)
def restore(
    place: PLACE = None,
    name: NAME = None,
    key_file: KEY_FILE = None,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Bring a backup back, on this machine or another one."""
    answer = in_process("restore", place, config, data_dir, *named(name), key_file=key_file)
    show_result(answer, output_format, "restored", "`appliance up` with this --data-dir starts the box")
    if output_format != "json":
        for note in _came_back(answer):
            output.say(f"note: {note}")


def _came_back(answer: dict[str, Any]) -> list[str]:
    """What a backup cannot know, which nobody would look for."""
    since = formats.moment(answer["made_s"])
    names = ", ".join(answer["live_keys"]) or "none"
    return [
        f"keys that were revoked or rotated, and people who were forgotten, after {since} are back as they were then. "
        f"Keys that live: {names}. `appliance key revoke`, `key rotate` and `appliance forget` end them again",
        f"it was at {answer['data_dir']}: at another path it takes no backups at {answer['where']}, but at a place of "
        "its own ([backup] url)",
    ]
