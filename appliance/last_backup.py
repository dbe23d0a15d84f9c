"""What the newest backup of a box was, in a file of its data directory: written when one is taken, read for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.replace_file import replace_file


@dataclass(frozen=True, slots=True)
class LastBackup:
    """made_s: Unix time. where: the place, without credentials."""

    name: str
    made_s: float
    where: str
    bytes: int


def read(path: Path) -> LastBackup | None:
    """None if none was taken, or if the file is not ours to understand."""
    try:
        return LastBackup(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write(path: Path, last: LastBackup) -> None:
    replace_file(path, json.dumps(asdict(last)).encode())
