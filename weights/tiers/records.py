"""Reads and caches a packed tier's records: which versions it has, and which bytes others can share.

It caches them, because only one process writes a tier, and reads a record again before relying on it.
"""

from __future__ import annotations

import logging

from weights.format.errors import IntegrityError, ObjectDamaged, VersionNotFound
from weights.tiers.objects import Objects
from weights.tiers.record import TENSOR, Name, Part, Record

log = logging.getLogger(__name__)


class Records:
    """The records in the `objects` of `tier`. Errors of the object store propagate."""

    def __init__(self, tier: str, objects: Objects) -> None:
        self._tier, self._objects = tier, objects
        self._read: dict[Name, Record] | None = None

    def all(self, *, strict: bool = False) -> dict[Name, Record]:
        """A copy, by name. It logs and skips a damaged record; with `strict` it raises IntegrityError, because the
        objects of that record are unknown."""
        return dict(self._known(strict=strict))

    def find(self, name: Name) -> Record:
        """Reads the record again. Raises VersionNotFound, IntegrityError."""
        if self._objects.size(name.key) is None:
            raise VersionNotFound(f"{name} is not in the {self._tier} tier")
        return Record.from_bytes(self._objects.get(name.key), path=self._path(name.key))

    def put(self, record: Record) -> None:
        self._objects.put(record.name.key, record.to_bytes())
        self._known()[record.name] = record

    def remove(self, name: Name) -> None:
        """Idempotent."""
        self._objects.delete(name.key)
        self._known().pop(name, None)

    def parts_by_checksum(self) -> dict[str, tuple[Part, ...]]:
        """Location in the tier of each tensor's bytes, by the tensor's checksum, without quantised tensors."""
        parts = {}
        for record in self.all().values():
            quantised = set(record.manifest.meta.get("quantised", ()))
            for tensor, found in record.manifest.tensors.items():
                if found.checksum is not None and tensor not in quantised:
                    parts[found.checksum] = record.pieces[TENSOR + tensor]
        return parts

    def objects(self) -> dict[str, int]:
        """Stored bytes of every object that a record needs, by object."""
        return {key: nbytes for record in self.all().values() for key, nbytes in record.objects.items()}

    def _known(self, *, strict: bool = False) -> dict[Name, Record]:
        if self._read is None or strict:
            found = {}
            for key, _ in list(self._objects.list("records/")):
                try:
                    record = Record.from_bytes(self._objects.get(key), path=self._path(key))
                    if record.name != Name.of_key(key):
                        raise ObjectDamaged(f"it is the record of {record.name}", path=self._path(key))
                    found[record.name] = record
                except IntegrityError as error:
                    log.error("the %s tier has a damaged record: %s", self._tier, error)
                    if strict:
                        self._read = None  # the next look leaves it out, and what it named is written again
                        raise
            self._read = found
        return self._read

    def _path(self, key: str) -> str:
        return f"{self._objects.where}/{key}"
