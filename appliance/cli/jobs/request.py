"""Options that commands on jobs share: how a job may use the devices, and files with a part of a request."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.command import given
from appliance.cli.errors import BadUsage
from appliance.cli.formats import seconds_of

DEVICES: dict[str, Any] = {
    "min_devices": Annotated[int | None, typer.Option("--min-devices", metavar="N", min=1, help="Never on fewer.")],
    "max_devices": Annotated[int | None, typer.Option("--max-devices", metavar="N", min=1, help="Never on more.")],
    "sizes": Annotated[
        str | None, typer.Option("--sizes", metavar="N,N,…", help="Only on these numbers of devices, e.g. 2,4,8.")
    ],
    "priority": Annotated[int | None, typer.Option("--priority", help="Higher goes first; default 0.")],
    "deadline": Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="8h from now, or 2026-11-22T06:00; the job goes first when the deadline is near.",
        ),
    ],
    "preemptible": Annotated[
        bool | None,
        typer.Option("--preemptible/--no-preemptible", help="May it be suspended for others? Default: yes."),
    ],
}
"""Options about how a job may use the devices, by their names in `device_fields`."""
NO_FIELDS: dict[str, Any] = {}
_NONE = ("none", "any")


def json_file(option: str, path: Path) -> Any:
    """Read a JSON file. Raises BadUsage."""
    try:
        return json.loads(path.expanduser().read_text())
    except OSError as error:
        raise BadUsage(f"{option} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadUsage(f"{option} {path} is not JSON: {error}") from error


def pairs(option: str, texts: list[str]) -> list[tuple[str, str]]:
    """Split texts of the form NAME=VALUE into names and values. Raises BadUsage."""
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise BadUsage(f"{option} is {text!r}; expected NAME=VALUE")
        found.append((name.strip(), value))
    return found


def device_fields(*, sizes: str | None = None, deadline: str | None = None, **same: Any) -> dict[str, Any]:
    """The fields of the request that were given. Raises BadUsage."""
    return given(
        **same,
        allowed_sizes=None if sizes is None else _sizes(sizes),
        deadline_s=None if deadline is None else moment_to_come("--deadline", deadline),
    )


def device_changes(*, sizes: str | None = None, deadline: str | None = None, **same: Any) -> dict[str, Any]:
    """Like `device_fields`, but "none" removes the sizes or the deadline. Raises BadUsage."""
    cleared = {field: None for field, text in (("allowed_sizes", sizes), ("deadline_s", deadline)) if text in _NONE}
    sizes, deadline = (None if text in _NONE else text for text in (sizes, deadline))
    return device_fields(sizes=sizes, deadline=deadline, **same) | cleared


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadUsage(f"--sizes is {text!r}; expected numbers of devices with commas between, e.g. 2,4,8")
    return [int(part) for part in parts]


def moment_to_come(option: str, text: str) -> float:
    moment = moment_of(option, text)
    if moment <= time.time():
        raise BadUsage(f"{option} is {text!r}, which is past; expected a future time, such as 8h from now")
    return moment


def moment_of(option: str, text: str) -> float:
    """Seconds since 1970 of a time from now (8h) or of a date with a time, local unless it says otherwise."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except OverflowError:
        raise BadUsage(f"{option} is {text!r}, later than a calendar goes") from None
    except ValueError:
        pass
    seconds = seconds_of(text)
    if seconds is None:
        raise BadUsage(f"{option} is {text!r}; expected a time from now such as 8h, or a date such as 2026-11-22T06:00")
    return time.time() + seconds
