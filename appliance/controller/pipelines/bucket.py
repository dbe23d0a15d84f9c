"""Reads data from a bucket of an S3-compatible store: lists its objects, and joins those that a run has chosen into one
file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from appliance.controller.interfaces.config import Bucket
from appliance.controller.pipelines.new_data import MOST_FILES, Found, NoData, bounded, fitting, write_lines
from weights.format.errors import ObjectDamaged
from weights.tiers.locations import s3_at
from weights.tiers.objects_s3 import S3Objects

MOST_KEYS = 1_000_000
"""At most so many objects are listed; nothing is taken from a bucket with more."""


class Changed(Exception):
    """An object that a run has chosen was deleted or changed since; the text says which."""


class _Stopped(Exception):
    """The reading was cancelled."""


def found_in(bucket: Bucket, pattern: str) -> Found:
    """Every object below the bucket's prefix whose name after the prefix fits the pattern (`*` stands for "/" too), by
    its whole address: [bytes, tag of its bytes]. Raises NoData, TierUnavailable."""
    objects, found, fits = s3_at(bucket), Found(), fitting(pattern)
    for seen, (key, size, tag) in enumerate(objects.tagged()):
        if seen == MOST_KEYS:
            raise NoData(f"there are more than {MOST_KEYS:,} objects below {objects.where}")
        if size and fits(key):
            found[objects.where + key] = [size, tag]
        if len(found) > MOST_FILES:
            break
    return bounded(found)


async def join_chosen(bucket: Bucket, chosen: Found, target: Path, room: Callable[[], None]) -> str:
    """Like `new_data.join_chosen`. It ends soon after it is cancelled. Raises OSError, TierUnavailable, Changed."""
    stop = Event()
    try:
        return await asyncio.to_thread(_join, s3_at(bucket), chosen, target, room, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


def _join(objects: S3Objects, chosen: Found, target: Path, room: Callable[[], None], stop: Event) -> str:
    parts = (_blocks(objects, address, int(size), tag, stop) for address, (size, tag) in chosen.items())
    return write_lines(parts, target, room)


def _blocks(objects: S3Objects, address: str, size: int, tag: str, stop: Event) -> Iterator[bytes]:
    """size: as the store's list has it, which is what was counted for the owner. A store may send more, without end."""
    if not address.startswith(objects.where):
        raise Changed(f"{address} is not below {objects.where}, where the configuration has this bucket now")
    try:
        for block in objects.blocks(address.removeprefix(objects.where), tag):
            if stop.is_set():
                raise _Stopped
            size -= len(block)
            if size < 0:
                raise Changed(f"{address} has more bytes than the bucket's list says")
            yield block
    except ObjectDamaged as error:
        raise Changed(f"{address} was changed or deleted since it was chosen") from error
