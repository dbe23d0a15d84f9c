"""Rotates the logs of all writers: our own, Ray's, engines', ranks' and the output of their libraries.

Writers keep their files open for append and are unaware of the rotation. It copies older lines to `NAME.1` and removes
them from the front of the file in one kernel call (FALLOC_FL_COLLAPSE_RANGE of fallocate(2)), so that no line written
meanwhile is lost. On file systems without that call (tmpfs, btrfs, ZFS) it truncates the file right after the copy:
lines written in between, some microseconds per rotation, are lost.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.libc import last_error, libc

log = logging.getLogger(__name__)

MIB = 2**20
DAY_S = 86400.0
_COLLAPSE_RANGE = 0x08
_NUMBERED = re.compile(r"(.+\.log)\.(\d{1,4})\Z")


@dataclass(frozen=True)
class LogLimits:
    """size: bytes at which a file is rotated. keep: number of rotated files per log. days: how long a log without a
    writer is kept. total: bytes of all logs; above it the oldest are deleted, except those with a writer."""

    size: int
    keep: int
    days: float
    total: int


class LogRotation:
    """Rotates every `*.log` in a folder. Call `tend` regularly, in a thread because it copies."""

    def __init__(self, folder: Path, limits: LogLimits):
        self._folder, self._limits = folder, limits

    def tend(self, now_s: float) -> None:
        """Rotate files that are too long, delete what exceeds age or total. Raises OSError only if the folder cannot be
        read; logs errors of single files."""
        for path in sorted(self._folder.glob("*.log")):
            try:
                if not path.is_symlink() and path.stat().st_size > self._limits.size:
                    self._rotate(path)
            except OSError as error:
                log.warning("%s cannot be rotated: %s", path, error)
        self._clear(now_s)

    def _rotate(self, path: Path) -> None:
        incoming = path.with_name(f"{path.name}.rotating")
        with open(path, "r+b", buffering=0) as live:
            block = os.fstatvfs(live.fileno()).f_bsize
            # The kernel removes whole blocks only, and never the whole file.
            length = (os.fstat(live.fileno()).st_size - 1) // block * block
            try:
                with open(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as out:
                    copied = _copy(live.fileno(), out.fileno(), 0, length)
                    self._shift(path)
                    os.rename(incoming, _numbered(path, 1))
                    if not collapse(live.fileno(), copied):
                        # Copy up to the end, then truncate at once.
                        copied += _copy(live.fileno(), out.fileno(), copied, None)
                        os.ftruncate(live.fileno(), 0)
            except OSError as error:
                incoming.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The disk is full: the newest lines are worth more than the older ones.
                self._forget(path)
                if length > 2 * self._limits.size and not collapse(live.fileno(), length):
                    os.ftruncate(live.fileno(), 0)
                log.warning("the disk is full: older lines of %s are gone", path.name)

    def _shift(self, path: Path) -> None:
        """Renames NAME.1 to NAME.2, and so on; deletes those beyond the number to keep."""
        for number, old in sorted(_rotated(path).items(), reverse=True):
            if number >= self._limits.keep:
                old.unlink(missing_ok=True)
            else:
                os.rename(old, _numbered(path, number + 1))

    def _forget(self, path: Path) -> None:
        for old in _rotated(path).values():
            old.unlink(missing_ok=True)

    def _clear(self, now_s: float) -> None:
        found = []
        for path in self._folder.iterdir():
            if path.name.endswith(".log") or _NUMBERED.match(path.name):
                try:
                    found.append((path.lstat(), path))
                except FileNotFoundError:
                    continue
        found.sort(key=lambda one: one[0].st_mtime)
        total = sum(stat.st_size for stat, _ in found)
        written: set[Path] | None = None
        for stat, path in found:
            if now_s - stat.st_mtime < self._limits.days * DAY_S and total <= self._limits.total:
                break
            if path.suffix == ".log":
                written = open_files(self._folder) if written is None else written
                if path in written:
                    continue
            path.unlink(missing_ok=True)
            total -= stat.st_size


def collapse(handle: int, length: int) -> bool:
    """Remove `length` bytes, whole blocks, from the front of a file. False if its file system cannot."""
    if not length or os.fstat(handle).st_size <= length:
        return False
    if libc.fallocate(handle, _COLLAPSE_RANGE, 0, length) == 0:
        return True
    error = last_error("cannot remove the front of a log")
    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise error


def open_files(folder: Path) -> set[Path]:
    """Files in this folder that are open in a process whose /proc entry this process may read."""
    found = set()
    prefix = f"{folder}/"
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        try:
            with os.scandir(f"/proc/{process.name}/fd") as handles:
                for handle in handles:
                    target = os.readlink(handle.path)
                    if target.startswith(prefix):
                        found.add(Path(target))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def _copy(source: int, target: int, offset: int, length: int | None) -> int:
    """Returns the bytes copied; length None copies up to the end."""
    copied = 0
    while length is None or copied < length:
        sent = os.sendfile(target, source, offset + copied, MIB if length is None else min(MIB, length - copied))
        if not sent:
            break
        copied += sent
    return copied


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _rotated(path: Path) -> dict[int, Path]:
    found = ((_NUMBERED.match(other.name), other) for other in path.parent.glob(f"{path.name}.*"))
    return {int(match[2]): other for match, other in found if match and match[1] == path.name}
