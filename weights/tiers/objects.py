"""A remote place as a flat map from keys to bytes: a directory here, S3 in objects_s3.py."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from weights.format.config import Location
from weights.format.errors import ObjectDamaged, TierFull, TierUnavailable
from weights.format.names import replace_file, sync

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}")  # of `replace_file`


@contextmanager
def tier_errors(where: Path) -> Iterator[None]:
    """Converts an OSError in the block to TierFull or TierUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{where}: {error.strerror}; free some, or keep fewer versions and snapshots"
            raise TierFull(reason) from error
        raise TierUnavailable(f"{where}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Makes the folder and those above it, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


class Objects(Protocol):
    """Keys are relative paths; no part of one begins with a dot. Every call may raise TierUnavailable."""

    where: str
    """A path or URL for messages, without credentials."""

    def put(self, key: str, data: bytes) -> None:
        """Stores `data` durably and atomically: the key has all of it or its previous content. Raises TierFull."""

    def get(self, key: str) -> bytes:
        """Raises ObjectDamaged if the key does not exist."""

    def list(self, prefix: str) -> Iterator[str]:
        """Keys below the folder `prefix` (it ends in "/")."""

    def delete(self, key: str) -> None:
        """Idempotent."""

    def sweep(self) -> None:
        """Removes incomplete objects of a dead writer. Call it only when no writer is active."""


class DirectoryObjects:
    """Files below `root`, which must exist, so that nothing is written below a lost mount."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.where = str(root)

    def put(self, key: str, data: bytes) -> None:
        target = self.root / key
        with self._rooted():
            make_folder(target.parent)
            replace_file(target.parent, target.name, data)

    def get(self, key: str) -> bytes:
        with self._rooted():
            try:
                return (self.root / key).read_bytes()
            except FileNotFoundError:
                raise ObjectDamaged("it is missing", path=self.root / key) from None

    def list(self, prefix: str) -> Iterator[str]:
        with self._rooted():
            for folder, _, names in os.walk(self.root / prefix):
                for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
                    yield path.relative_to(self.root).as_posix()

    def delete(self, key: str) -> None:
        with self._rooted():
            (self.root / key).unlink(missing_ok=True)

    def sweep(self) -> None:
        with self._rooted():
            for folder, _, names in os.walk(self.root):
                for name in names:
                    if _PARTIAL.fullmatch(name):
                        Path(folder, name).unlink(missing_ok=True)

    @contextmanager
    def _rooted(self) -> Iterator[None]:
        if not self.root.is_dir():
            raise TierUnavailable(f"there is no directory {self.root}; is it mounted?")
        with tier_errors(self.root):
            yield


def objects_at(location: Location) -> Objects:
    """The store at a location whose `url` is set. Raises TierUnavailable if its settings make no client."""
    assert location.url is not None
    if not location.url.startswith("s3://"):
        return DirectoryObjects(location.url)
    from weights.tiers.objects_s3 import S3Objects  # boto3 takes half a second

    return S3Objects(location)
