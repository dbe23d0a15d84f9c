"""A version being written: reserved, invisible, filled by any number of processes, then committed or gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weights.format.checksums import checksum, checksum_all, compare
from weights.format.errors import DraftNotFound, VersionExists
from weights.format.files import write_file
from weights.format.layout import Layout
from weights.format.manifest import FileRecord, Prepared
from weights.format.names import DRAFT_FILE, MANIFEST_FILE, PINNED_FILE, WRITTEN_FILE, version_path
from weights.memory import segment
from weights.memory.lease import StoredVersion
from weights.memory.locks import DirectoryLock
from weights.memory.mapped import Mapped
from weights.memory.pool import Pool
from weights.memory.removal import dismantle

MAX_WRITERS = 1 << 16
WRITTEN_POLL_S = 0.0005  # a reader of a few bytes that are in memory; the last writer is waited for no longer than this


class Draft(Mapped):
    """Made by `WeightStore.reserve` or `WeightStore.attach`. A context manager: leaving it uncommitted aborts
    it where it was reserved, and lets go of it where it was attached.

    Every process that has it open holds a shared lock on its directory. When all are gone without a commit,
    a sweep removes it. `path` is what other processes attach to.

    Views are writable and shared with every process that has the draft open: what is written is in the version at once.
    Writers of disjoint ranges need no coordination but that all are done before `commit`.
    """

    def __init__(
        self, root: Path, path: Path, layout: Layout, lock: DirectoryLock, *, kind: str, model: str, version: str,
        owner: bool,
    ) -> None:  # fmt: skip
        super().__init__(path, layout, lock, "write")
        self.kind = kind
        self.model = model
        self.version = version
        self._root = root
        self._owner = owner
        self._prepared: Prepared | None = None

    @property
    def closed(self) -> bool:
        return not self._held

    @property
    def target(self) -> Path:
        """Where the version will stand once it is committed."""
        return self._target()

    def mark_written(self, writer: int) -> None:
        """Says that `writer` (0-based, of those the draft was reserved for) has written all that it will. Raises
        HandleClosed."""
        fd = os.open(WRITTEN_FILE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open_lock().fd)
        try:
            os.pwrite(fd, b"\1", writer)
        finally:
            os.close(fd)

    def wait_written(self) -> None:
        """Returns when every writer has said so. There is no time limit: who dies without a word is for the caller's
        supervisor to notice. Raises HandleClosed."""
        fd = os.open(WRITTEN_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open_lock().fd)
        try:
            while b"\0" in os.pread(fd, MAX_WRITERS, 0):
                time.sleep(WRITTEN_POLL_S)
        finally:
            os.close(fd)

    def prepare(self) -> None:
        """Makes what of the manifest is known before the bytes are, so that `commit` need not."""
        if self._prepared is None:
            self._prepared = Prepared.of(self.layout, kind=self.kind, model=self.model, version=self.version)

    def populate(self, views: Iterable[memoryview] | None = None) -> None:
        """Takes the page faults of `views` (default: everything) now, so that writing them runs at memcpy
        rate. Worth it ahead of time for a draft whose segments are new."""
        if views is None:
            views = [self.file_view(file.name) for file in self.layout.files]
        for view in views:
            segment.populate(view, write=True)

    def commit(
        self,
        *,
        meta: Mapping[str, Any],
        checksums: bool = True,
        checksum_threads: int = 1,
        pinned: bool = True,
        expected_checksums: Mapping[str, str | None] | None = None,
        source: object = None,
    ) -> StoredVersion:
        """Makes the version visible, all at once, and closes the draft.

        `checksums=False` leaves the hot path at memcpy rate; `WeightStore.seal` adds them later. A `pinned`
        version is not evicted until `tiers.persist` or `WeightStore.unpin`: eviction never takes a last copy.
        With `expected_checksums` (tensor name -> checksum) a version whose bytes differ is never published; `source` is
        where they came from, for the error.
        Raises VersionExists, ChecksumMismatch (the draft stays open), ManifestInvalid if `meta` is not JSON.
        """
        # Only the number: a frame in a traceback that held the lock itself would outlive the abort that follows.
        fd = self._open_lock().fd
        target = self._target()
        if target.exists():
            raise VersionExists(
                f"{self.kind} {self.model!r} {self.version!r} exists; commit under another version or remove it"
            )
        digests = None
        if checksums:
            views = {placed.spec.name: self.view(placed.spec.name) for placed in self.layout}
            digests = checksum_all(views, threads=checksum_threads)
            del views
            compare(digests, expected_checksums or {}, self.layout, path=source or self.path)
        self.prepare()
        manifest, text = self._prepared.complete(
            created_s=time.time(), meta=meta, aux_files=self._aux_records(), checksums=digests
        )
        write_file(fd, MANIFEST_FILE, text)
        if pinned:
            write_file(fd, PINNED_FILE, b"")
        os.unlink(WRITTEN_FILE, dir_fd=fd)
        self._unlist(fd)
        self._publish(target)
        self._let_go()
        return StoredVersion(self.kind, self.model, self.version, target, manifest.nbytes, manifest)

    def abort(self) -> None:
        """Gives the draft's memory back; nothing of it was ever visible. Safe to call twice and after commit.

        Where other processes or views still hold the draft, the last of them to close it cleans up, or a
        sweep after they died.
        """
        lock = self._let_go()
        if lock is None:
            return
        self._unlist(lock.fd)
        lock = None  # noqa: F841 - the last reference closes the descriptor
        self._dismantle_if_last()

    def close(self) -> None:
        """Lets go of an attached draft without deciding about it; on the reserving handle this aborts."""
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

    def _closed(self) -> str:
        return f"the draft {self.path} was committed, aborted, or lost in a fork; a forked child attaches anew"

    def _target(self) -> Path:
        return version_path(self._root, self.kind, self.model, self.version)

    def _aux_records(self) -> dict[str, FileRecord]:
        index = self.layout.index_file()
        own = {file.name for file in self.layout.files} | {MANIFEST_FILE, PINNED_FILE, DRAFT_FILE, WRITTEN_FILE}
        records = {}
        for name in sorted(set(os.listdir(self.path)) - own):
            data = (self.path / name).read_bytes()
            records[name] = FileRecord(len(data), checksum(data))
        assert index is None or index[0] in records
        return records

    def _publish(self, target: Path) -> None:
        while True:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.rename(self.path, target)
                return
            except FileNotFoundError:
                # The model's directory was removed as empty between mkdir and rename: make it again. If the
                # draft itself is gone, nothing will bring it back.
                if not self.path.exists():
                    raise DraftNotFound(f"the draft {self.path} is gone: swept or already committed") from None
            except OSError as error:
                if target.exists():
                    raise VersionExists(
                        f"{self.kind} {self.model!r} {self.version!r} was committed by another writer"
                    ) from error
                raise

    def _unlist(self, directory_fd: int) -> None:
        try:
            os.unlink(DRAFT_FILE, dir_fd=directory_fd)
        except FileNotFoundError:
            pass

    def _dismantle_if_last(self) -> None:
        exclusive = DirectoryLock.try_exclusive(self.path)
        if exclusive is not None:
            try:
                dismantle(self.path, Pool(self._root / "pool"))
            finally:
                exclusive.close()


def describe_draft(directory_fd: int, *, kind: str, model: str, version: str) -> None:
    """Lists the draft for `attach`; written last, so that an attach never sees half a draft."""
    body = json.dumps({"kind": kind, "model": model, "version": version})
    write_file(directory_fd, DRAFT_FILE, body.encode())


def attach_draft(root: Path, path: Path, layout: Layout | None = None) -> Draft:
    """The draft at `path`, in this process; `layout` is that of its reservation, read from its files where it is not
    given. Raises DraftNotFound, IntegrityError."""
    gone = f"no draft at {path}: it was committed, aborted or swept, or is of another store"
    lock = DirectoryLock.try_shared(path) if path.parent == root / "staging" else None
    if lock is None:
        raise DraftNotFound(gone)
    try:
        body = json.loads((path / DRAFT_FILE).read_bytes())
        layout = layout or Layout.read(path)
    except BaseException as error:
        # At once, not when the traceback goes: the last holder of an aborted draft cleans up.
        lock.close()
        if isinstance(error, FileNotFoundError):
            raise DraftNotFound(gone) from None
        raise
    return Draft(root, path, layout, lock, kind=body["kind"], model=body["model"], version=body["version"], owner=False)
