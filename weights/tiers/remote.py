"""Versions and snapshots at a remote place, each file in objects of up to 32 MiB.

    copies/<kind>s/<model>/<version>               the manifest; written last, so a version with a record is complete
    parts/<kind>s/<model>/<version>/<file>.<n>     the n-th part of a file of the version

With moments in 8 bits a part has blocks (weights.tiers.moments). One process writes a place; any may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from blake3 import blake3

from weights.format.errors import IntegrityError, ObjectDamaged, TierUnavailable, VersionNotFound
from weights.format.layout import Layout
from weights.format.manifest import CHUNK_BYTES, Chunks, Manifest, checksum
from weights.format.names import Name
from weights.tiers import moments
from weights.tiers.objects import Objects
from weights.tiers.tier import Tier

OWNER_KEY = "owner"
MOMENTS = "moments_in_8_bits"
"""Of a manifest's meta: where the files of a snapshot have them (weights.tiers.moments.Range)."""
log = logging.getLogger(__name__)


class RemoteTier(Tier):
    """`int8_moments`: Adam's moments of snapshots are stored in 8 bits."""

    def __init__(self, objects: Objects, *, int8_moments: bool = False) -> None:
        self.where, self._objects, self._int8_moments = objects.where, objects, int8_moments
        self._records: dict[Name, Manifest] | None = None

    def claim(self, owner: str, first: bool) -> None:
        """Checks that the place belongs to `owner`; claims it if it has no owner and this is the `first` time.

        Raises TierUnavailable otherwise: a lost mount leaves an empty directory, and two boxes in one place would
        remove each other's objects.
        """
        try:
            holder = self._objects.get(OWNER_KEY).decode(errors="replace")
        except ObjectDamaged:
            if not first:
                raise TierUnavailable(f"{self.where} is empty, and this box wrote to it; is it mounted?") from None
            self._objects.put(OWNER_KEY, owner.encode())
            holder = owner
        if holder != owner:
            raise TierUnavailable(
                f"{self.where} belongs to box {holder[:40]!r}, this is {owner!r}; give each box a place of its own, or "
                f"delete {OWNER_KEY} there to take it over"
            )

    def manifests(self) -> dict[Name, Manifest]:
        """Every version with a readable manifest. The place is read once: this process alone writes it."""
        if self._records is None:
            records = {}
            for key in list(self._objects.list("copies/")):
                try:
                    manifest = Manifest.from_bytes(self._objects.get(key), path=f"{self.where}/{key}")
                except IntegrityError as error:
                    log.error("the remote tier has a damaged record: %s", error)
                    continue
                if key == f"copies/{manifest.name.key}":
                    records[manifest.name] = manifest
            self._records = records
        return self._records

    def remove(self, name: Name) -> bool:
        self._objects.delete(f"copies/{name.key}")
        known = self.manifests().pop(name, None) is not None
        for key in list(self._objects.list(f"parts/{name.key}/")):
            self._objects.delete(key)
        return known

    def collect(self) -> None:
        self._objects.sweep()
        complete = tuple(f"parts/{name.key}/" for name in self.manifests())
        for key in list(self._objects.list("parts/")):
            if not key.startswith(complete):
                self._objects.delete(key)

    def _manifest(self, name: Name) -> Manifest:
        if name not in self.manifests():
            raise VersionNotFound(f"{name} is not at {self.where}")
        return self.manifests()[name]

    def _chunks(self, name: Name, file: str) -> Iterator[bytes]:
        manifest = self._manifest(name)
        ranges, nbytes = manifest.meta.get(MOMENTS, {}).get(file), manifest.files[file].nbytes
        for number, start in enumerate(range(0, nbytes, CHUNK_BYTES)):
            data = self._objects.get(_part_key(name, file, number))
            yield moments.decode(data, ranges, start, min(CHUNK_BYTES, nbytes - start)) if ranges else data

    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, sealed: Callable[[], Manifest]) -> None:
        name, checksums = manifest.name, dict[str, str]()
        ranges = moments.ranges_of(layout) if self._int8_moments and name.kind == "snapshot" else {}
        for file in manifest.files:
            decoded = blake3()
            for number, data in enumerate(chunks(file)):
                if file in ranges:
                    start, nbytes = number * CHUNK_BYTES, len(data)
                    data = moments.encode(data, ranges[file], start)
                    decoded.update(moments.decode(data, ranges[file], start, nbytes))
                self._objects.put(_part_key(name, file, number), data)
            if file in ranges:
                checksums[file] = checksum(decoded)  # of the bytes that come back
        meta = {key: value for key, value in manifest.meta.items() if key != MOMENTS}
        manifest = replace(sealed(), meta=meta | ({MOMENTS: ranges} if ranges else {})).with_checksums(checksums)
        self._objects.put(f"copies/{name.key}", manifest.to_bytes())
        self.manifests()[name] = manifest


def _part_key(name: Name, file: str, number: int) -> str:
    return f"parts/{name.key}/{file}.{number:06}"
