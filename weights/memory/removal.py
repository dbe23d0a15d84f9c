"""Removes directories under their exclusive lock, which excludes readers."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from weights.format.names import TENSOR_SUFFIX
from weights.memory import segment
from weights.memory.locks import DirectoryLock
from weights.memory.pool import Pool


def dismantle(directory: Path, pool: Pool | None) -> None:
    """Removes `directory`, whose exclusive lock the caller holds. Its tensor files go to `pool`; without one their
    memory is freed."""
    for entry in list(os.scandir(directory)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(path)
        elif entry.name.endswith(TENSOR_SUFFIX) and entry.is_file(follow_symlinks=False):
            pool.give(path) if pool is not None else segment.destroy(path)
        else:
            os.unlink(path)
    os.rmdir(directory)


def dismantle_unheld(directory: Path, pool: Pool | None = None) -> None:
    """`dismantle`, unless a living process holds the directory or it is gone."""
    lock = DirectoryLock.try_exclusive(directory)
    if lock is not None:
        try:
            dismantle(directory, pool)
        finally:
            lock.close()


def hide(directory: Path, staging: Path) -> Path:
    """Hides a version by one rename. A sweep removes leftovers of a crash."""
    hidden = staging / f"removed-{uuid.uuid4().hex}"
    os.rename(directory, hidden)
    try:
        os.rmdir(directory.parent)
    except OSError:  # other versions of the model stay, or a commit just came
        pass
    return hidden
