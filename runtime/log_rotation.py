"""Logs that do not grow for ever, whoever writes them: ours, Ray's, engines', ranks' and what their libraries print.

Writers hold their files open for append and know nothing of this. What is older is copied to `NAME.1` and then cut off
the front of the file in one step of the kernel (FALLOC_FL_COLLAPSE_RANGE of fallocate(2)), so that no line is lost that
is written meanwhile. On a file system without it (tmpfs, btrfs, ZFS) the file is truncated right after the copy: then
what is written between the two is lost, which is microseconds a rotation.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MIB = 2**20
DAY_S = 86400.0
_COLLAPSE_RANGE = 0x08
_NUMBERED = re.compile(r"(.+\.log)\.(\d{1,4})\Z")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True)
class LogLimits:
    """size: of a file before it is rotated. keep: rotated ones of each. days: that one is kept which nobody writes any
    more. total: bytes of all of them; past it the oldest go, but never one that is being written."""

    size: int
    keep: int
    days: float
    total: int


class LogRotation:
    """Of every `*.log` in a folder. `tend` is called from time to time, in a thread: it copies."""

    def __init__(self, folder: Path, limits: LogLimits):
        self._folder, self._limits = folder, limits

    def tend(self, now_s: float) -> None:
        """Rotate what is too long and delete what is too old or too much. Raises OSError only where the folder cannot
        be read; one file's trouble is logged."""
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
            # Whole blocks, and never the whole file, which the kernel would refuse to cut off.
            length = (os.fstat(live.fileno()).st_size - 1) // block * block
            try:
                with open(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as out:
                    copied = _copy(live.fileno(), out.fileno(), 0, length)
                    self._shift(path)
                    os.rename(incoming, _numbered(path, 1))
                    if not collapse(live.fileno(), copied):
                        # To the very end, and cut at once.
                        copied += _copy(live.fileno(), out.fileno(), copied, None)
                        os.ftruncate(live.fileno(), 0)
            except OSError as error:
                incoming.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # A full disk: the newest lines are worth more than the older ones.
                self._forget(path)
                if length > 2 * self._limits.size and not collapse(live.fileno(), length):
                    os.ftruncate(live.fileno(), 0)
                log.warning("the disk is full: older lines of %s are gone", path.name)

    def _shift(self, path: Path) -> None:
        """NAME.1 becomes NAME.2, and so on; those past the number to keep go."""
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
    """Cut so many bytes, whole blocks, off the front of a file. False where its file system cannot."""
    if not length or os.fstat(handle).st_size <= length:
        return False
    if _libc.fallocate(handle, _COLLAPSE_RANGE, 0, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number))


def open_files(folder: Path) -> set[Path]:
    """Files in this folder that a process which we may look into has open."""
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
            continue  # it has ended, or is another user's
    return found


def _copy(source: int, target: int, offset: int, length: int | None) -> int:
    """Bytes copied; length None: up to the end."""
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
