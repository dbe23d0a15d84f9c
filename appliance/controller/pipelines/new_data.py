"""Finds training data that no run has taken yet, in a folder of the box or among uploaded files by name, and joins it
into one file. bucket.py does the same for buckets."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""A file that was changed less than this long ago may still be written, and waits."""
_BLOCK = 1 << 20
_ROOM_EVERY = 64 << 20


class NoData(Exception):
    """The place that a pipeline names cannot be read, or holds too much; the text says which."""


def in_folder(folder: str, pattern: str, now_s: float) -> Found:
    """Lists regular files only; follows no links, in the folder or on the way to it. Raises NoData."""
    found, fits = Found(), fitting(pattern)
    try:
        descriptor = _open_without_links(Path(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    if not fits(entry.name) or not entry.is_file(follow_symlinks=False):
                        continue
                    info = entry.stat(follow_symlinks=False)
                    if info.st_size and now_s - info.st_mtime >= SETTLED_S:
                        found[os.path.join(folder, entry.name)] = [info.st_size, info.st_mtime_ns]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoData(f"{folder} cannot be read: {error.strerror}") from error
    return bounded(found)


def _open_without_links(path: Path, flags: int) -> int:
    """Opens `path`, which is absolute, and returns a descriptor. Follows no link: somebody who may write to a folder on
    the way could otherwise make the box read a file that he may not read himself. Raises NoData for a link, OSError."""
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    *folders, last = path.parts[1:] or (".",)
    for part, how in [*((one, os.O_PATH | os.O_DIRECTORY) for one in folders), (last, flags)]:
        try:
            below = os.open(part, how | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        except OSError as error:
            if stat.S_ISLNK(_mode(part, here)):
                raise NoData(
                    f"{part!r} in {path} is a symbolic link, and none is followed: give the path without it, which is "
                    f"{os.path.realpath(path)} now"
                ) from error
            raise
        finally:
            os.close(here)
        here = below
    return here


def _mode(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return 0


def uploaded(context: ControllerContext, pattern: str, owner: str) -> Found:
    """Raises NoData."""
    rows, fits = files.named(context.db, owner, now_s=time.time()), fitting(pattern)
    return bounded({file_id: [size] for file_id, size, name in rows if fits(name)})


def fitting(pattern: str) -> Callable[[str], object]:
    """Tells whether a name fits the pattern. fnmatch's own function caches 32,768 compiled patterns: a person who kept
    changing a pattern made the controller hold 250 MB."""
    return re.compile(fnmatch.translate(pattern)).match


def bounded(found: Found) -> Found:
    if len(found) > MOST_FILES:
        raise NoData(f"there are {len(found)} files; at most {MOST_FILES} are taken")
    return dict(sorted(found.items()))


def new(found: Found, taken: Found, data: Data) -> Found:
    """The part of `found` that no run has taken yet. A file of a folder or an object of a bucket is new again once it
    has changed; an uploaded file never changes."""
    if data.take == "all":
        return found
    if not data.elsewhere:
        return {name: state for name, state in found.items() if name not in taken}
    return {name: state for name, state in found.items() if taken.get(name) != state}


def join_chosen(chosen: Found, folder: Path | None, target: Path, room: Callable[[], None]) -> str:
    """Joins these files into one and returns its SHA-256. They are named relative to this folder, or with None by their
    whole paths; each is read up to the size that was seen. room: raises once the disk is full. Raises OSError, and
    NoData for what is no longer a regular file."""
    flags = os.O_RDONLY | os.O_NONBLOCK

    def opened(name: str) -> int:
        if folder is None:
            return _open_without_links(Path(name), flags)
        return os.open(folder / name, flags | os.O_NOFOLLOW)  # the box's own, wherever it has its data

    return write_lines((_blocks(opened, name, int(state[0])) for name, state in chosen.items()), target, room)


def places(joined: Path, chosen: Found, lines: Sequence[int]) -> dict[int, tuple[str, int]]:
    """For each of these lines, the joined file that it is from and its line there. Raises OSError."""
    found, before = {}, 0
    with open(joined, "rb") as source:
        for name, state in chosen.items():
            left, count, last = int(state[0]), 0, b"\n"
            while left and (block := source.read(min(left, _BLOCK))):
                left, count, last = left - len(block), count + block.count(b"\n"), block[-1:]
            if last != b"\n":
                source.read(1)  # the newline that `write_lines` added
                count += 1
            found |= {line: (name, line - before) for line in lines if before < line <= before + count}
            before += count
    return found


def write_lines(parts: Iterable[Iterator[bytes]], target: Path, room: Callable[[], None]) -> str:
    """Write the blocks of each part into a new file, with a newline after a part that ends without one; returns the
    file's SHA-256. room: called now and then, because others write at the same time. Raises OSError, and whatever
    `room` raises."""
    digest, unasked = hashlib.sha256(), 0
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        for part in parts:
            last = b"\n"
            for block in part:
                out.write(block)
                digest.update(block)
                last = block[-1:]
                unasked += len(block)
                if unasked >= _ROOM_EVERY:
                    room()
                    unasked = 0
            if last != b"\n":
                out.write(b"\n")
                digest.update(b"\n")
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _blocks(opened: Callable[[str], int], name: str, most: int) -> Iterator[bytes]:
    descriptor = opened(name)
    with os.fdopen(descriptor, "rb") as source:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoData(f"{name} is not a regular file any more")
        while block := source.read(min(_BLOCK, most)):
            most -= len(block)
            yield block
