"""Defines a packed tier's object store, a flat map from keys to bytes: a directory here, S3 in objects_s3.py."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from weights.format.errors import ObjectDamaged, TierFull, TierUnavailable
from weights.format.files import open_regular, sync

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAKE_ROOM = "free some, or keep fewer versions and snapshots"
_PARTIAL = ".partial"


@contextmanager
def tier_errors(where: Path) -> Iterator[None]:
    """Converts an OSError in the block to TierFull or TierUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise TierFull(f"{where}: {error.strerror}; {_MAKE_ROOM}") from error
        raise TierUnavailable(f"{where}: {error.strerror or error}") from error


def require_space(root: Path, needed_bytes: int, free_bytes: int) -> None:
    """Raises TierFull if `needed_bytes` more would leave less than `free_bytes` free on the file system of `root`."""
    free = shutil.disk_usage(root).free
    if free - needed_bytes < free_bytes:
        raise TierFull(
            f"{root} has {free} bytes free and must keep {free_bytes}: {needed_bytes} more do not fit; {_MAKE_ROOM}"
        )


class Objects(Protocol):
    """Keys are relative paths; no part of one begins with a dot. Every call may raise TierUnavailable."""

    where: str
    """A path or URL for messages, without credentials."""

    def put(self, key: str, data: bytes) -> None:
        """Stores `data` durably and atomically: the key has all of it or its previous content. Raises TierFull."""

    def get(self, key: str) -> bytes:
        """Raises ObjectDamaged if the key does not exist."""

    def size(self, key: str) -> int | None:
        """Bytes stored under `key`, None if there is none."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys below the folder `prefix` (it ends in "/") and their sizes in bytes."""

    def delete(self, key: str) -> None:
        """Idempotent."""

    def sweep(self) -> None:
        """Removes incomplete objects of a dead writer. Call it only when no writer is active."""


class DirectoryObjects:
    """Files below `root`, on a local disk or a mount. It leaves `free_bytes` of the file system free.

    `create` creates the root. A mount must already exist, so that nothing is written below a lost one.
    """

    def __init__(self, root: Path | str, *, free_bytes: int = 0, create: bool = False) -> None:
        self.root = Path(root)
        self.where = str(root)
        self._free_bytes = free_bytes
        if create:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        with self._translated():
            self._require_root()
            require_space(self.root, len(data), self._free_bytes)
            target, partial = self.root / key, self.root / _PARTIAL / uuid.uuid4().hex
            partial.parent.mkdir(mode=0o700, exist_ok=True)
            self._make_folder(target.parent)
            try:
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb", buffering=0) as file:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.rename(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync(target.parent)

    def get(self, key: str) -> bytes:
        path = self.root / key
        with self._translated():
            self._require_root()
            if not path.parent.is_dir() or not path.exists():
                raise ObjectDamaged("it is missing", path=path)
            with open_regular(path.parent, path.name) as file:
                return file.readall()

    def size(self, key: str) -> int | None:
        with self._translated():
            self._require_root()
            try:
                return os.stat(self.root / key, follow_symlinks=False).st_size
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._translated():
            self._require_root()
            for folder, _, names in os.walk(self.root / prefix):
                for name in sorted(names):
                    path = Path(folder) / name
                    yield path.relative_to(self.root).as_posix(), path.stat(follow_symlinks=False).st_size

    def delete(self, key: str) -> None:
        with self._translated():
            self._require_root()
            (self.root / key).unlink(missing_ok=True)

    def sweep(self) -> None:
        with self._translated():
            self._require_root()
            for path in (self.root / _PARTIAL).glob("*"):
                path.unlink(missing_ok=True)

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise TierUnavailable(f"there is no directory {self.root}; is it mounted?")

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync(folder.parent)

    def _translated(self) -> AbstractContextManager[None]:
        return tier_errors(self.root)
