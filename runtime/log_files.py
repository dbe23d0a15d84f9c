"""The logs of a folder: which there are, and how one ends."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_PACKED = (".gz", ".zst")


class LogFile(NamedTuple):
    """changed_s: Unix time. name: below the folder."""

    changed_s: float
    size: int
    name: str

    @property
    def is_packed(self) -> bool:
        return self.name.endswith(_PACKED)


def logs_in(folder: Path) -> list[LogFile]:
    """Those written last first."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            try:
                told = path.stat()
            except FileNotFoundError:
                continue  # turned over meanwhile
            found.append(LogFile(told.st_mtime, told.st_size, path.relative_to(folder).as_posix()))
    return sorted(found, reverse=True)


def end_of(path: Path, most_bytes: int) -> tuple[str, int]:
    """The end of a log, and how many bytes are before it: with some its first line is cut. Raises OSError."""
    with path.open("rb") as file:
        before = max(0, file.seek(0, 2) - most_bytes)
        file.seek(before)
        return file.read(most_bytes).decode(errors="replace"), before
