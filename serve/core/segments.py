"""Segments that engines make in /dev/shm, outside the box's own folder there: named so that whoever is left can
remove them, when an engine was killed, or its supervisor with it."""

from __future__ import annotations

import hashlib
from pathlib import Path

SEGMENTS = Path("/dev/shm")


def prefix_of(socket_path: str | Path) -> str:
    """Begins the names of all segments of the engine that listens there."""
    path = Path(socket_path)
    return f"{_folder_prefix(path.parent)}{_digest(path.name, 6)}."


def remove_of(socket_path: str | Path) -> None:
    """Remove what the engine that listened there left."""
    _remove(prefix_of(socket_path))


def remove_below(sockets: Path) -> None:
    """Remove what engines left whose sockets were in this folder; none of them may run any more."""
    _remove(_folder_prefix(sockets))


def _remove(prefix: str) -> None:
    for segment in SEGMENTS.glob(f"{prefix}*"):
        segment.unlink(missing_ok=True)


def _folder_prefix(folder: Path) -> str:
    return f"appliance-{_digest(str(folder), 8)}."


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
