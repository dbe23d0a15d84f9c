"""Implements the weight store: reserve -> write -> commit -> lease -> evict, safe against kill -9 at any point.

docs/weight-store.md has the rules and their reasons. Directory locks decide which process may remove what; one mutex
file serialises space accounting; only a rename makes a version visible or invisible.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weights.format.checksums import checksum
from weights.format.errors import (
    IntegrityError,
    InvalidName,
    StoreFull,
    StoreUnsafe,
    VersionExists,
    VersionLeased,
    VersionNotFound,
)
from weights.format.files import replace_file, write_file
from weights.format.layout import Layout
from weights.format.manifest import KINDS
from weights.format.names import MANIFEST_FILE, WRITTEN_FILE, check_aux_name, version_path
from weights.format.source import copy_file, read_source
from weights.memory import segment
from weights.memory.draft import Draft, attach_draft, describe_draft, hold_manifest_room
from weights.memory.evictor import Evictor, Usage
from weights.memory.lease import Lease, StoredVersion, take_lease
from weights.memory.locks import DirectoryLock


@dataclass(frozen=True)
class SweepReport:
    """Paths that a sweep removed, and committed versions it found damaged (left in place)."""

    removed: tuple[Path, ...]
    damaged: tuple[IntegrityError, ...]


class WeightStore:
    """Versions and snapshots under `root`. Any number of processes may hold one on the same root.

    `budget_bytes` bounds everything the store holds, pool and drafts included; None means no bound but the
    file system's. `pool_bytes` bounds the pool of freed segments (default: only by the budget). The root is
    made if it is absent. Raises StoreUnsafe if it is a symlink, belongs to another user or is open to others.
    """

    def __init__(self, root: Path | str, *, budget_bytes: int | None, pool_bytes: int | None = None) -> None:
        self.root = Path(root)
        self.budget_bytes = budget_bytes
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(self.root)
        self._evictor = Evictor(self.root, budget_bytes=budget_bytes, pool_bytes=pool_bytes)
        self._evictor.make_directories()

    # Writing

    def reserve(
        self,
        layout: Layout,
        *,
        kind: str,
        model: str,
        version: str,
        aux_files: Mapping[str, bytes] | None = None,
        writers: int = 1,
        name: str | None = None,
    ) -> Draft:
        """A draft with all its memory allocated, headers and `aux_files` written, tensors undefined.

        `kind` is "version", "adapter" or "snapshot". Evicts unleased, unpinned versions if the budget asks for it. The
        tensors' bytes are undefined (segments are re-used): write every byte before the commit. `writers` is how many
        will call `Draft.mark_written`. Writers that know the `name` find the draft with `draft_path`. Raises StoreFull
        (nothing left behind), VersionExists, InvalidName.
        """
        aux_files = dict(aux_files or {})
        for aux in aux_files:
            check_aux_name(aux)
        if version_path(self.root, _check_kind(kind), model, version).exists():
            raise VersionExists(f"{kind} {model!r} {version!r} exists; choose another version name or remove it")
        index = layout.index_file()
        if index is not None:
            aux_files[index[0]] = index[1]
        needed_bytes = layout.nbytes + sum(len(data) for data in aux_files.values())
        path = self.draft_path(name or uuid.uuid4().hex)
        lock: DirectoryLock | None = None
        try:
            with self._evictor.mutex():
                lock = self._evictor.stake(layout, needed_bytes, path)
            self._allocate(layout, lock.fd, needed_bytes)
            for file in layout.files:
                with open(os.open(file.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=lock.fd), "wb") as out:
                    out.write(file.header)
            for aux, data in aux_files.items():
                write_file(lock.fd, aux, data)
            write_file(lock.fd, WRITTEN_FILE, bytes(writers))
            hold_manifest_room(lock.fd, layout)
            describe_draft(lock.fd, kind=kind, model=model, version=version)
        except BaseException as error:
            if lock is not None:
                lock.close()
                self._evictor.pool.take_unheld(path, keep=False)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise self.full(needed_bytes) from error
            raise
        return Draft(self.root, path, layout, lock, kind=kind, model=model, version=version, owner=True)

    def _allocate(self, layout: Layout, directory_fd: int, needed_bytes: int) -> None:
        """Allocates the files' memory. Raises OSError ENOSPC if eviction did not help."""
        for file in layout.files:
            try:
                segment.allocate(directory_fd, file.name)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # The file system is fuller than the budget assumes: free the pool and evictable versions.
                with self._evictor.mutex():
                    self._evictor.evict(needed_bytes)
                    self._evictor.pool.trim(0)
                segment.allocate(directory_fd, file.name)

    def full(self, needed_bytes: int) -> StoreFull:
        """The StoreFull error, with its numbers, for a caller that writes this many bytes beside the versions here."""
        with self._evictor.mutex():
            return self._evictor.full(needed_bytes)

    def draft_path(self, name: str) -> Path:
        """Path of a draft reserved under `name` until its commit."""
        return self._evictor.staging / name

    def attach(self, path: Path | str, layout: Layout | None = None) -> Draft:
        """Opens the draft that another process reserved at `path`. Passing the layout saves reading it. Raises
        DraftNotFound, IntegrityError."""
        return attach_draft(self.root, Path(path), layout)

    def import_dir(
        self,
        src_dir: Path | str,
        *,
        model: str,
        version: str,
        kind: str = "version",
        pinned: bool = False,
    ) -> StoredVersion:
        """A committed copy of a checkpoint directory, evictable unless `pinned`: same tensor files byte for byte.

        A source with a manifest keeps its `meta`, and is compared with its checksums before anything becomes visible.
        Raises IntegrityError, InvalidLayout, StoreFull, VersionExists.
        """
        source = read_source(Path(src_dir))
        with self.reserve(source.layout, kind=kind, model=model, version=version, aux_files=source.aux_files) as draft:
            for file in source.layout.files:
                os.close(copy_file(source.directory, draft.path, file.name, file.nbytes))
            return draft.commit(
                meta=source.meta, pinned=pinned, expected_checksums=source.checksums, source=source.directory
            )

    # Reading

    def find(self, kind: str, model: str, version: str) -> StoredVersion | None:
        """The committed version of this name, or None. Raises ManifestInvalid if it is damaged."""
        path = version_path(self.root, _check_kind(kind), model, version)
        try:
            return StoredVersion.read(path) if path.exists() else None
        except IntegrityError:
            if path.exists():
                raise
            return None  # removed while we read it

    def list(self, kind: str, model: str | None = None) -> list[StoredVersion]:
        """All readable versions of `kind`, or those of one model, oldest first. Damaged ones are reported by `sweep`,
        not here."""
        found = []
        for path in self._evictor.committed(_check_kind(kind), model):
            try:
                found.append(StoredVersion.read(path))
            except IntegrityError:
                continue
        return sorted(found, key=lambda stored: stored.manifest.created_s)

    def count(self, kind: str) -> int:
        """How many versions of `kind` there are, damaged ones too."""
        return len(self._evictor.committed(_check_kind(kind)))

    def lease(self, stored: StoredVersion) -> Lease:
        """Takes a lease on `stored`; see `weights.memory.lease.take_lease`."""
        return take_lease(stored)

    def seal(self, stored: StoredVersion) -> None:
        """Records the checksums that `commit(checksums=False)` left out, beside readers. Raises VersionNotFound,
        IntegrityError."""
        with self.lease(stored) as lease:
            digests = {name: checksum(view) for name, view in lease.views().items()}
            replace_file(stored.path, MANIFEST_FILE, lease.manifest.with_checksums(digests).to_bytes())

    # Removing

    def remove(self, stored: StoredVersion) -> None:
        """Removes a version, pinned or not; its segments go to the pool.

        Raises VersionLeased while a reader holds it, VersionNotFound if it is gone.
        """
        if not self._discard(stored.path):
            raise VersionNotFound(f"{stored.kind} {stored.model!r} {stored.version!r} is no longer at {stored.path}")

    def discard(self, kind: str, model: str, version: str) -> None:
        """Removes the version of this name, even if unreadable. Idempotent. Raises VersionLeased."""
        self._discard(version_path(self.root, _check_kind(kind), model, version))

    def _discard(self, path: Path) -> bool:
        with self._evictor.mutex():
            lock = DirectoryLock.try_exclusive(path)
            if lock is None:
                if path.exists():
                    raise VersionLeased(f"{path} is being read; it can be removed when its last lease is released")
                return False
            self._evictor.take_down(path, lock)
            self._evictor.trim(0)
            return True

    def evict(self, bytes_needed: int) -> int:
        """Frees at least `bytes_needed` bytes if possible: the pool first, then unleased, unpinned versions, least
        recently used first. Returns the bytes freed."""
        with self._evictor.mutex():
            before = self.usage()
            self._evictor.pool.trim(max(0, before.pool_bytes - bytes_needed))
            if before.pool_bytes < bytes_needed:
                self._evictor.evict(bytes_needed - before.pool_bytes)
                self._evictor.pool.trim(0)
            return before.used_bytes - self.usage().used_bytes

    def evictable_bytes(self) -> int:
        """Bytes of unleased versions and snapshots that are not pinned, because another tier has them."""
        with self._evictor.mutex():
            return self._evictor.evictable_bytes()

    def sweep(self) -> SweepReport:
        """Removes leftovers of dead processes: unlocked drafts, half-removed versions, stray files.

        It never touches anything that a live process holds, nor a committed version.
        """
        with self._evictor.mutex():
            removed = self._evictor.sweep_drafts()
        damaged = []
        for kind in KINDS:
            for path in self._evictor.committed(kind):
                try:
                    stored = StoredVersion.read(path)
                    if version_path(self.root, stored.kind, stored.model, stored.version) != path:
                        raise IntegrityError(
                            f"the manifest names {stored.model!r} {stored.version!r}, not this directory", path=path
                        )
                    stored.manifest.check_layout(Layout.read(path), path=path)
                except IntegrityError as error:
                    if path.exists():
                        damaged.append(error)
        return SweepReport(tuple(removed), tuple(damaged))

    def trim_pool(self, keep_bytes: int = 0) -> int:
        """Returns freed segments to the system until the pool holds at most `keep_bytes`; returns the bytes freed."""
        with self._evictor.mutex():
            return self._evictor.pool.trim(keep_bytes)

    def usage(self) -> Usage:
        """What the store holds now, in bytes of file sizes (what is reserved counts as held)."""
        return self._evictor.usage()

    def room_bytes(self, *, enough_bytes: int | None = None) -> int:
        """Bytes available to a reservation now: free bytes plus unleased, unpinned ones.

        With `enough_bytes` the answer is cheaper: it may be too low once it is at least that.
        """
        free = self._free_bytes(self.usage().pool_bytes)
        if enough_bytes is not None and free >= enough_bytes:
            return free
        with self._evictor.mutex():
            return free + self._evictor.evictable_bytes()

    def _free_bytes(self, reusable_bytes: int = 0) -> int:
        """Bytes that nothing takes, in the file system and in the budget."""
        in_memory, in_budget = shutil.disk_usage(self.root).free + reusable_bytes, self._evictor.free_bytes()
        return in_memory if in_budget is None else min(in_memory, in_budget)


def _check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise InvalidName(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def _check_private(root: Path) -> None:
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        raise StoreUnsafe(f"{root} must be a real directory, not a symlink or file")
    if status.st_uid != os.geteuid():
        raise StoreUnsafe(f"{root} belongs to user {status.st_uid}, this process runs as {os.geteuid()}")
    if status.st_mode & 0o077:
        raise StoreUnsafe(
            f"{root} is open to other users (mode {stat.S_IMODE(status.st_mode):o}); make it 0700: chmod 700 {root}"
        )
