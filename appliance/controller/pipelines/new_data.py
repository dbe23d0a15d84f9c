"""What there is to train on: files of a folder of the box, or uploaded ones by their names, that no run has taken yet;
joined to one file. Buckets are in bucket.py."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from appliance.controller.context.context import ControllerContext
from appliance.controller.pipelines.spec import Data
from appliance.store.objects import files

Found = dict[str, list[Any]]
"""Path, address or file id -> [bytes, and of a path when it was changed (ns), of an object its tag], in order of their
names."""
MOST_FILES = 10_000
SETTLED_S = 5.0
"""A file of a folder that was changed later may still be written."""
_BLOCK = 1 << 20


class NoData(Exception):
    """The place that a pipeline names cannot be read, or holds too much; the text says which."""


def in_folder(folder: str, pattern: str, now_s: float) -> Found:
    """Regular files alone, without links. Raises NoData."""
    found: Found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not fnmatch.fnmatchcase(entry.name, pattern) or not entry.is_file(follow_symlinks=False):
                    continue
                told = entry.stat(follow_symlinks=False)
                if told.st_size and now_s - told.st_mtime >= SETTLED_S:
                    found[entry.path] = [told.st_size, told.st_mtime_ns]
    except OSError as error:
        raise NoData(f"{folder} cannot be read: {error.strerror}") from error
    return bounded(found)


def uploaded(context: ControllerContext, pattern: str, owner: str) -> Found:
    """Raises NoData."""
    rows = files.named(context.db, owner, now_s=time.time())
    return bounded({file_id: [size] for file_id, size, name in rows if fnmatch.fnmatchcase(name, pattern)})


def bounded(found: Found) -> Found:
    if len(found) > MOST_FILES:
        raise NoData(f"there are {len(found)} files; at most {MOST_FILES} are taken")
    return dict(sorted(found.items()))


def new(found: Found, taken: Found, data: Data) -> Found:
    """What is in a folder or a bucket may have changed; an uploaded file never does."""
    if data.take == "all":
        return found
    if not data.elsewhere:
        return {name: told for name, told in found.items() if name not in taken}
    return {name: told for name, told in found.items() if taken.get(name) != told}


def join_chosen(chosen: Found, folder: Path | None, target: Path) -> str:
    """One file of these, by their names in this folder, or with None by their paths; as many bytes of each as were
    seen; its SHA-256. Raises OSError, and NoData for what is not a regular file any more."""
    parts = [((folder / name) if folder is not None else Path(name), int(told[0])) for name, told in chosen.items()]
    return write_lines((_blocks(path, most) for path, most in parts), target)


def write_lines(parts: Iterable[Iterator[bytes]], target: Path) -> str:
    """Write the blocks of each part, and a newline where one ends without, into a new file; its SHA-256. Raises
    OSError."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        for part in parts:
            last = b"\n"
            for block in part:
                out.write(block)
                digest.update(block)
                last = block[-1:]
            if last != b"\n":
                out.write(b"\n")
                digest.update(b"\n")
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _blocks(path: Path, most: int) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as source:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoData(f"{path} is not a regular file any more")
        while block := source.read(min(_BLOCK, most)):
            most -= len(block)
            yield block
