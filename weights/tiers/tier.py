"""Defines a tier: a place below shared memory that has copies of versions, adapters and snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from weights.format.layout import Layout
from weights.format.manifest import Chunks, Manifest, chunks_of, hashed
from weights.format.names import Name
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore

Moved = Callable[[int], object]
"""Called with the bytes of each chunk that was copied; an exception from it aborts the copy."""


class Tier(ABC):
    """`where`: a path or URL for messages. Every call may raise TierUnavailable."""

    where: str

    @abstractmethod
    def manifests(self) -> dict[Name, Manifest]:
        """Every version with a readable manifest."""

    @abstractmethod
    def remove(self, name: Name) -> bool:
        """Removes `name`, out of sight in one step. Idempotent; False if there was none."""

    @abstractmethod
    def collect(self) -> None:
        """Removes what a dead process was copying or removing. Call it while nothing is copied."""

    @abstractmethod
    def _manifest(self, name: Name) -> Manifest:
        """The sealed manifest. Raises VersionNotFound, IntegrityError."""

    @abstractmethod
    def _chunks(self, name: Name, file: str) -> Iterator[bytes]:
        """The bytes of a file. Raises IntegrityError."""

    @abstractmethod
    def _write(self, manifest: Manifest, layout: Layout, chunks: Chunks, sealed: Callable[[], Manifest]) -> None:
        """Stores the files, each from its `chunks`; then `sealed` returns the manifest with which they become visible,
        in place of what is here under its name. Raises TierFull."""

    def place(self, name: Name) -> str:
        """Where `name` is, for messages."""
        return f"{self.where}/{name.key}"

    def put(self, source: Path, moved: Moved = lambda nbytes: None) -> None:
        """Copies the version directory `source`, which must not change meanwhile (in shared memory: lease it).

        Raises TierFull, and IntegrityError if its bytes differ from its manifest; nothing becomes visible then.
        """
        manifest, layout, checksums = Manifest.read(source), Layout.read(source), dict[str, str]()
        manifest.check_layout(layout, path=source)

        def chunks(file: str) -> Iterator[bytes]:
            read, expected = chunks_of(source, manifest, file), manifest.files[file].checksum
            for chunk in hashed(read, expected, checksums, path=source, file=file):
                yield chunk
                moved(len(chunk))

        self._write(manifest, layout, chunks, lambda: manifest.with_checksums(checksums))

    def restore(self, store: WeightStore, name: Name) -> StoredVersion:
        """Restores `name` into `store`, evictable, and checks every byte before it becomes visible. Raises
        VersionNotFound, IntegrityError, NotSealed, StoreFull, VersionExists."""
        return store.receive(self._manifest(name), partial(self._chunks, name), source=self.place(name))
