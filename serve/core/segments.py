"""Names and removes the segments that engines create in /dev/shm outside the box's own folder. The names let any
surviving process remove them after an engine, or its supervisor too, was killed."""

from __future__ import annotations

import hashlib
from pathlib import Path

SEGMENTS = Path("/dev/shm")


def prefix_of(socket_path: str | Path) -> str:
    """Return the name prefix of all segments of the engine that listens on this socket."""
    path = Path(socket_path)
    return f"{_folder_prefix(path.parent)}{_digest(path.name, 6)}."


def remove_of(socket_path: str | Path) -> None:
    """Remove the segments left by the engine that listened on this socket."""
    _remove(prefix_of(socket_path))


def remove_below(sockets: Path) -> None:
    """Remove the segments left by engines whose sockets were in this folder; none of those engines may still run."""
    _remove(_folder_prefix(sockets))


def _remove(prefix: str) -> None:
    for segment in SEGMENTS.glob(f"{prefix}*"):
        segment.unlink(missing_ok=True)


def _folder_prefix(folder: Path) -> str:
    return f"appliance-{_digest(str(folder), 8)}."


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
