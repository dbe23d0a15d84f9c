"""Limits use of the data directory's volume: requests that store bytes are refused before the disk is full.

A full disk stops everything, including what would free space: SQLite cannot revoke a key, a job cannot save its state.
So the last bytes are reserved for the box itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.controller.interfaces.errors import ApiError, Unavailable

GIB = 2**30
_LEAST_BYTES, _MOST_BYTES = 2 * GIB, 20 * GIB


def floor_of(total_bytes: int) -> int:
    """2 % of a volume, at least 2 GiB and at most 20; never more than a tenth of a small one."""
    return min(max(_LEAST_BYTES, total_bytes // 50), _MOST_BYTES, total_bytes // 10)


class Disk:
    """path: on the volume. floor_bytes None: `floor_of` the volume's size."""

    def __init__(self, path: Path, floor_bytes: int | None, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs):
        self._path, self._floor_bytes, self._statvfs = path, floor_bytes, statvfs

    def room_bytes(self) -> int:
        """Free above the floor; negative below it."""
        now = self._statvfs(self._path)
        floor = floor_of(now.f_blocks * now.f_frsize) if self._floor_bytes is None else self._floor_bytes
        return now.f_bavail * now.f_frsize - floor

    def why_short(self) -> str:
        """Why nothing more is written now; empty: there is room."""
        return "" if self.room_bytes() > 0 else "the disk of the box is short of space"

    def check(self, more_bytes: int = 0) -> None:
        """Raises ApiError 507 if this many more bytes would leave less than the floor."""
        room = self.room_bytes()
        if more_bytes > room or room <= 0:
            raise insufficient_storage(
                f"The disk of the box has {max(room, 0)} bytes left above what it keeps free for itself"
                + (f"; {more_bytes} more are needed" if more_bytes else "")
            )


@contextmanager
def disk_may_be_full() -> Iterator[None]:
    """Raises ApiError 507 in place of an OSError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise insufficient_storage("The disk of the box is full") from error
        raise


def insufficient_storage(what: str) -> ApiError:
    return Unavailable(
        507,
        f"{what}. Delete files, models or stored responses first, or ask an admin to make room ([controller] "
        "disk_floor_bytes is what stays free).",
        code="insufficient_storage",
        retry=False,
    )
