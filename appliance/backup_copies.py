"""Who copies the database for a backup: one process at a time, into a folder of the data directory that goes when the
process ends. One that was killed leaves it, with everything that the database had; `sweep` removes that."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".backup-"
LOCK = "backup.lock"


@contextmanager
def alone(data_dir: Path) -> Iterator[bool]:
    """Whether nobody else takes a backup of this directory; if so, nobody begins one meanwhile."""
    with open(os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def sweep(data_dir: Path) -> None:
    """Removes what a backup that was killed has left, and nothing of one that runs."""
    with alone(data_dir) as nobody_else:
        if nobody_else:
            remove_left(data_dir)


def remove_left(data_dir: Path) -> None:
    """Call it only while `alone`."""
    for left in data_dir.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
