"""Lists the logs of a folder, and reads the end of one."""

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
    logs = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # turned over meanwhile
            logs.append(LogFile(status.st_mtime, status.st_size, path.relative_to(folder).as_posix()))
    return sorted(logs, reverse=True)


def end_of(path: Path, most_bytes: int) -> tuple[str, int]:
    """The end of a log, and how many bytes are before it: with some its first line is cut. Raises OSError."""
    with path.open("rb") as file:
        before = max(0, file.seek(0, 2) - most_bytes)
        file.seek(before)
        return file.read(most_bytes).decode(errors="replace"), before
