"""Defines what one backup holds: a list of files, each a list of chunks by their SHA-256. Backups share equal chunks.

In the place, `backups/NAME.json` is a manifest and `chunks/AB/ABCD...` a chunk. The manifest is written last, so a
backup that was broken off does not count, and the next one uses its chunks.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from appliance.backup.errors import BackupDamaged, NoBackup
from runtime.moments import STAMP, stamp
from weights.format.errors import ObjectDamaged
from weights.tiers.objects import Objects

FORMAT = 1
CHUNK_BYTES = 16 << 20
DATABASE_CHUNK_BYTES = 1 << 20
"""Smaller than other chunks, because few of its pages change between backups: 16 MiB were written for a few kB."""
_FOLDER = "backups/"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME_BYTES = 255
_NO_TIME_S = 1 << 37  # the year 6325; time.gmtime ended with OSError at 1e18 s, and took None for now
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """path: below the data directory, with "/". mtime_ns: of the file when it was read; 0: read it again next time."""

    path: str
    bytes: int
    mtime_ns: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """name: sorts by time. schema: the number of the database's newest migration. secrets: whether private keys are in
    it. new_bytes: bytes that no earlier backup of this place had."""

    name: str
    made_s: float
    box_id: str
    version: str
    schema: int
    data_dir: str
    secrets: bool
    new_bytes: int
    files: tuple[SavedFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def chunk_key(digest: str) -> str:
    return f"chunks/{digest[:2]}/{digest}"


def write(objects: Objects, manifest: Manifest) -> None:
    body = json.dumps({"format": FORMAT, **asdict(manifest)}, separators=(",", ":"))
    objects.put(f"{_FOLDER}{manifest.name}.json", f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode())


def names(objects: Objects) -> list[str]:
    """Oldest first."""
    return sorted(PurePosixPath(key).stem for key, _ in objects.list(_FOLDER) if key.endswith(".json"))


def read(objects: Objects, name: str) -> Manifest:
    """Raises NoBackup, BackupDamaged."""
    if name not in (known := names(objects)):
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise NoBackup(f"{objects.where} has no backup {name!r}; {have}")
    return _read(objects, name)


def _read(objects: Objects, name: str) -> Manifest:
    """Reads a manifest that was listed already: a store answers a list in a request of its own, too many for each
    manifest."""
    try:
        digest, _, body = objects.get(f"{_FOLDER}{name}.json").decode().partition("\n")
        body = body.removesuffix("\n")
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise BackupDamaged(
                f"the manifest of {name} at {objects.where} is not what was written; use another backup"
            )
        fields: dict[str, Any] = json.loads(body)
        if fields.pop("format") != FORMAT:
            raise BackupDamaged(f"the backup {name} at {objects.where} is of a newer release; restore it with that one")
        files = tuple(SavedFile(**{**file, "chunks": tuple(file["chunks"])}) for file in fields.pop("files"))
        return _checked(Manifest(**fields, files=files), name)
    except (ObjectDamaged, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BackupDamaged(f"the manifest of {name} at {objects.where} cannot be read: {error}") from error


def _checked(found: Manifest, name: str) -> Manifest:
    """Checks a manifest, because a place is elsewhere and others may write there. It must have the form that `write`
    writes, name no path outside the data directory, and show a terminal nothing but text. Raises ValueError."""
    texts = (found.box_id, found.version, found.data_dir)
    numbers = [found.schema, found.new_bytes, *(file.bytes for file in found.files)]
    times = [file.mtime_ns for file in found.files]
    for file in found.files:
        if max(map(len, os.fsencode(file.path).split(b"/"))) > _NAME_BYTES:
            raise ValueError("it names a file that no file system takes")
        if file.path.startswith("/") or "\0" in file.path or not {"", ".", ".."}.isdisjoint(file.path.split("/")):
            raise ValueError(f"it names a file outside the data directory: {file.path!r}")
        if not all(_DIGEST.fullmatch(chunk) for chunk in file.chunks):
            raise ValueError(f"it names no chunk by its sum for {file.path!r}")
    paths = {file.path for file in found.files}
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    if len(paths) < len(found.files) or not paths.isdisjoint(folders):
        raise ValueError("it names a file twice, or as a folder")
    if not all(type(number) is int and abs(number) < 1 << 63 for number in (*numbers, *times)) or min(numbers) < 0:
        raise ValueError("it has no numbers where numbers belong")
    if found.name != name or any(_CONTROL.search(text) for text in texts) or type(found.secrets) is not bool:
        raise ValueError("it has other texts than are written there")
    if type(found.made_s) not in (int, float) or not 0 <= found.made_s < _NO_TIME_S:
        raise ValueError("it was made at no time")
    return found


def next_name(objects: Objects, made_s: float) -> str:
    """Returns the name of a backup made now. It sorts after all others at the place, even those made while the clock
    was ahead; otherwise the newest would be deleted as the oldest."""
    for name in reversed(names(objects)):
        try:
            last_s = calendar.timegm(time.strptime(name, STAMP))
        except ValueError:
            continue  # not a name of ours
        return stamp(max(made_s, last_s + 1))
    return stamp(made_s)


def readable(objects: Objects) -> tuple[list[Manifest], list[str]]:
    """Returns the manifests that can be read, oldest first, and the names of the others."""
    found, damaged = [], []
    for name in names(objects):
        try:
            found.append(_read(objects, name))
        except BackupDamaged as error:
            log.warning("%s", error)
            damaged.append(name)
    return found, damaged


def newest_readable(objects: Objects) -> Manifest | None:
    """A damaged manifest does not keep further backups from being taken."""
    for name in reversed(names(objects)):
        try:
            return _read(objects, name)
        except BackupDamaged as error:
            log.warning("%s", error)
    return None


def newest(objects: Objects) -> Manifest | None:
    known = names(objects)
    return _read(objects, known[-1]) if known else None


def remove(objects: Objects, gone: Iterable[str]) -> None:
    """Deletes these backups, and every chunk that no other backup has. Call it only when nobody writes to the place."""
    if not (gone := set(gone)):
        return  # otherwise each backup would read all manifests and list all chunks for nothing
    for name in gone:
        objects.delete(f"{_FOLDER}{name}.json")
    others, damaged = readable(objects)
    if damaged:
        log.warning("no chunks are deleted at %s: nobody knows which of them %s has", objects.where, ", ".join(damaged))
        return
    kept = {chunk for manifest in others for file in manifest.files for chunk in file.chunks}
    for key, _ in list(objects.list("chunks/")):
        if PurePosixPath(key).name not in kept:
            objects.delete(key)
