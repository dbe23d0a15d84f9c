"""Implements drafts, versions being written: reserved, invisible, filled by several processes, committed or aborted."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.format.checksums import checksum, compare
from weights.format.errors import DraftNotFound, VersionExists
from weights.format.files import write_file
from weights.format.layout import Layout
from weights.format.manifest import FileRecord, Manifest
from weights.format.names import DRAFT_FILE, MANIFEST_FILE, MANIFEST_ROOM_FILE, PINNED_FILE, WRITTEN_FILE, version_path
from weights.memory.lease import Mapped, StoredVersion
from weights.memory.locks import DirectoryLock
from weights.memory.pool import Pool

MAX_WRITERS = 1 << 16
_META_BYTES, _TENSOR_BYTES = 16384, 256  # of a manifest; most of a tensor's entry is its checksum
_MADE_OR_OPENED = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
WRITTEN_POLL_S = 0.0005  # each look reads a few bytes of memory; a commit waits at most this long after the last writer


class Draft(Mapped):
    """Made by `WeightStore.reserve` or `WeightStore.attach`. A context manager: leaving it without a commit aborts the
    draft on the handle that reserved it, and only closes an attached handle.

    Every process that has it open holds a shared lock on its directory. If all end without a commit, a sweep removes
    it. Other processes attach to `path`.

    Views are writable and shared by every process that has the draft open: writes are in the version at once. Writers
    of disjoint ranges need no coordination, but all must finish before `commit`.
    """

    def __init__(
        self,
        root: Path,
        path: Path,
        layout: Layout,
        lock: DirectoryLock,
        *,
        kind: str,
        model: str,
        version: str,
        owner: bool,
    ) -> None:
        super().__init__(path, layout, lock, "write")
        self.kind = kind
        self.model = model
        self.version = version
        self._root = root
        self._owner = owner

    @property
    def target(self) -> Path:
        """Path of the version after the commit."""
        return version_path(self._root, self.kind, self.model, self.version)

    def mark_written(self, writer: int) -> None:
        """Records that `writer` (0-based, of those the draft was reserved for) has written its part. Raises
        HandleClosed."""
        fd = os.open(WRITTEN_FILE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open_lock().fd)
        try:
            os.pwrite(fd, b"\1", writer)
        finally:
            os.close(fd)

    def wait_written(self) -> None:
        """Returns when every writer has marked its part. It has no time limit: the caller's supervisor detects a writer
        that dies without its mark. Raises HandleClosed."""
        fd = os.open(WRITTEN_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open_lock().fd)
        try:
            while b"\0" in os.pread(fd, MAX_WRITERS, 0):
                time.sleep(WRITTEN_POLL_S)
        finally:
            os.close(fd)

    def commit(
        self,
        *,
        meta: Mapping[str, Any],
        checksums: bool = True,
        pinned: bool = True,
        expected_checksums: Mapping[str, str | None] | None = None,
        source: object = None,
    ) -> StoredVersion:
        """Makes the version visible atomically and closes the draft.

        `checksums=False` keeps the hot path at memcpy rate; `WeightStore.seal` adds them. A `pinned` version is not
        evicted until `copies.persist` or `lease.unpin`: eviction never takes a last copy.
        With `expected_checksums` (tensor name -> checksum) a version whose bytes differ is never published; the error
        names `source`, where the bytes came from.
        Raises VersionExists, ChecksumMismatch (the draft stays open), ManifestInvalid if `meta` is not JSON.
        """
        # The descriptor, not the lock: a traceback's frames would keep the lock open beyond the following abort.
        fd = self._open_lock().fd
        target = self.target
        if target.exists():
            raise VersionExists(
                f"{self.kind} {self.model!r} {self.version!r} exists; commit under another version or remove it"
            )
        digests = None
        if checksums:
            digests = {placed.spec.name: checksum(self.view(placed.spec.name)) for placed in self.layout}
            compare(digests, expected_checksums or {}, self.layout, path=source or self.path)
        manifest = Manifest.describe(
            self.layout,
            kind=self.kind,
            model=self.model,
            version=self.version,
            created_s=time.time(),
            meta=meta,
            aux_files=self._aux_records(),
            checksums=digests,
        )
        _write_manifest(fd, manifest.to_bytes())
        if pinned:
            write_file(fd, PINNED_FILE, b"")
        os.unlink(WRITTEN_FILE, dir_fd=fd)
        self._unlist(fd)
        self._publish(target)
        self._let_go()
        return StoredVersion(self.kind, self.model, self.version, target, manifest.nbytes, manifest)

    def abort(self) -> None:
        """Frees the draft's memory; the draft was never visible. Safe to call twice and after commit.

        If other processes or views still hold the draft, the last one to close it cleans up, or a sweep after their
        death.
        """
        lock = self._let_go()
        if lock is None:
            return
        self._unlist(lock.fd)
        lock = None  # noqa: F841 - the last reference closes the descriptor
        self._dismantle_if_last()

    def close(self) -> None:
        """Closes an attached handle and leaves the draft to the others; on the reserving handle it aborts."""
        if self._owner:
            self.abort()
            return
        lock = self._let_go()
        if lock is None:
            return
        lock = None  # noqa: F841 - the last reference closes the descriptor
        if not (self.path / DRAFT_FILE).exists():
            self._dismantle_if_last()

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _aux_records(self) -> dict[str, FileRecord]:
        index = self.layout.index_file()
        own = {MANIFEST_FILE, MANIFEST_ROOM_FILE, PINNED_FILE, DRAFT_FILE, WRITTEN_FILE}
        own |= {file.name for file in self.layout.files}
        records = {}
        for name in sorted(set(os.listdir(self.path)) - own):
            data = (self.path / name).read_bytes()
            records[name] = FileRecord(len(data), checksum(data))
        assert index is None or index[0] in records
        return records

    def _publish(self, target: Path) -> None:
        while True:
            for directory in (target.parent.parent, target.parent):  # `parents` would give the first another mode
                directory.mkdir(mode=0o700, exist_ok=True)
            try:
                os.rename(self.path, target)
                return
            except FileNotFoundError:
                # The model's directory was removed as empty between mkdir and rename: make it again, unless the draft
                # itself is gone.
                if not self.path.exists():
                    raise DraftNotFound(f"the draft {self.path} is gone: swept or already committed") from None
            except OSError as error:
                if target.exists():
                    raise VersionExists(
                        f"{self.kind} {self.model!r} {self.version!r} was committed by another writer"
                    ) from error
                raise

    def _unlist(self, directory_fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(DRAFT_FILE, dir_fd=directory_fd)

    def _dismantle_if_last(self) -> None:
        Pool(self._root / "pool").take_unheld(self.path, keep=True)


def hold_manifest_room(directory_fd: int, layout: Layout) -> None:
    """Allocates the manifest's memory while an error is still harmless. Raises OSError ENOSPC.

    Without this page, the commit of an epoch's version once failed on full memory and ended the run.
    """
    room = _META_BYTES + sum(_TENSOR_BYTES + len(placed.spec.name) for placed in layout)
    fd = os.open(MANIFEST_ROOM_FILE, _MADE_OR_OPENED, 0o600, dir_fd=directory_fd)
    try:
        os.posix_fallocate(fd, 0, room)
    finally:
        os.close(fd)


def _write_manifest(directory_fd: int, text: bytes) -> None:
    """Writes into the reserved memory; a longer manifest allocates more. Raises OSError ENOSPC."""
    fd = os.open(MANIFEST_ROOM_FILE, _MADE_OR_OPENED, 0o600, dir_fd=directory_fd)
    with os.fdopen(fd, "wb") as file:
        file.write(text)
        file.truncate()
    os.rename(MANIFEST_ROOM_FILE, MANIFEST_FILE, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def describe_draft(directory_fd: int, *, kind: str, model: str, version: str) -> None:
    """Makes the draft visible to `attach`. Written last, so that no process attaches to an incomplete draft."""
    body = json.dumps({"kind": kind, "model": model, "version": version})
    write_file(directory_fd, DRAFT_FILE, body.encode())


def attach_draft(root: Path, path: Path, layout: Layout | None = None) -> Draft:
    """Opens the draft at `path` in this process. `layout`: the one it was reserved with; without it this reads the
    files. Raises DraftNotFound, IntegrityError."""
    gone = f"no draft at {path}: it was committed, aborted or swept, or is of another store"
    lock = DirectoryLock.try_shared(path) if path.parent == root / "staging" else None
    if lock is None:
        raise DraftNotFound(gone)
    try:
        body = json.loads((path / DRAFT_FILE).read_bytes())
        layout = layout or Layout.read(path)
    except BaseException as error:
        # Close now, not when the traceback is freed: the last holder of an aborted draft cleans up.
        lock.close()
        if isinstance(error, FileNotFoundError):
            raise DraftNotFound(gone) from None
        raise
    return Draft(root, path, layout, lock, kind=body["kind"], model=body["model"], version=body["version"], owner=False)
