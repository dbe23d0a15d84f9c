"""What the newest backup of a box was, in a file of its data directory: written when one is taken, read for people."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


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
    partial = path.with_name(f"{path.name}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(last), file)
    os.replace(partial, path)
