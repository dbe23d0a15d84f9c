"""Manages a node's copies of other nodes' versions, adapters, snapshots and job data, and lends out its own.

Rules
- A copy is verified against its checksums before it can be found.
- It stays leased for the holder that it was made for ("serve <model>", "job <id> base") until that holder takes another
  one or releases it, or home has deleted what it is a copy of.
- What another node is copying from here is leased meanwhile, so that its segments are not overwritten during the copy.
- What is copied home is pinned until a tier has it. A node may evict its copy of what home has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from runtime.network.tunnel import Shared, fetch_directory
from weights.format.errors import IntegrityError, StoreError, StoreFull, VersionNotFound
from weights.format.names import step_of
from weights.memory.lease import Lease, StoredVersion, take_lease, unpin
from weights.memory.store import WeightStore
from weights.tiers.record import Name

JOB_DATA = ("train.jsonl", "valid.jsonl")
KEPT_SNAPSHOTS = 2


class NodeCopies:
    """`shared`: settings common to all nodes (see runtime.network.tunnel). Call all methods on one event loop."""

    def __init__(self, shm_root: Path, jobs_dir: Path, budget_bytes: int | None, shared: Shared):
        self._shm_root, self._jobs_dir, self._budget_bytes, self._shared = shm_root, jobs_dir, budget_bytes, shared
        self._copying = asyncio.Lock()
        self._held: dict[str, Lease] = {}
        self._lent: dict[Path, Lease] = {}

    async def take(self, address: tuple[str, int], name: Name, remote: Path, holder: str) -> dict[str, Any]:
        """Copy `name` into this node's shared memory, leased for `holder`. Returns `{"path", "bytes", "seconds"}`,
        with 0 bytes if it was there. `remote`: its path on the node at `address`.

        Raises TunnelRefused, weights' errors, OSError.
        """
        began_s = time.monotonic()
        lease, received_bytes = await self.leased(address, name, remote)
        old, self._held[holder] = self._held.get(holder), lease
        if old is not None:
            old.release()
        return {"path": lease.path, "bytes": received_bytes, "seconds": time.monotonic() - began_s}

    async def leased(self, address: tuple[str, int], name: Name, remote: Path) -> tuple[Lease, int]:
        """A lease on this node's copy, which is made if missing, and the bytes received. Raises like `take`."""
        store = self._store()
        async with self._copying:
            stored, received_bytes = await self._found_or_fetched(store, address, name, remote, pinned=False)
            return store.lease(stored), received_bytes

    async def keep(self, address: tuple[str, int], name: Name, remote: Path) -> tuple[Path, int]:
        """At home: copy in what another node made and pin it; returns its path and the bytes received. A snapshot that
        does not fit in shared memory goes to the job's own store on disk, as from ranks at home. Raises like `take`."""
        store = self._store()
        async with self._copying:
            try:
                stored, received_bytes = await self._found_or_fetched(store, address, name, remote, pinned=True)
            except StoreFull:
                if name.kind != "snapshot":
                    raise
                store = WeightStore(self._jobs_dir / name.model / "snapshots", budget_bytes=None)
                stored, received_bytes = await self._found_or_fetched(store, address, name, remote, pinned=True)
            if name.kind == "snapshot":
                await asyncio.to_thread(_forget_snapshots, store, name.model, KEPT_SNAPSHOTS)
        return stored.path, received_bytes

    async def lend(self, path: Path) -> bool:
        """Keep the version at `path` unchanged until `take_back`, because another node copies it. False if it is
        gone."""
        if not path.is_relative_to(self._shm_root):
            return path.is_dir()  # nobody overwrites a version on disk
        try:
            self._lent[path] = take_lease(StoredVersion.read(path))
        except (VersionNotFound, IntegrityError):
            return False
        return True

    async def take_back(self, path: Path, safe: bool = False) -> None:
        """End `lend`. `safe`: home has it now, so this node may evict it."""
        lease = self._lent.pop(path, None)
        if lease is None:
            return
        if safe:
            with contextlib.suppress(VersionNotFound, IntegrityError):
                unpin(StoredVersion.read(path))
        lease.release()

    async def fetch_job(self, address: tuple[str, int], remote: Path, job_id: str) -> Path:
        """The job's folder with its data on this node, copied from `remote` the first time. Raises like `take`."""
        folder = self._jobs_dir / job_id
        async with self._copying:
            if not (folder / JOB_DATA[0]).exists():
                shutil.rmtree(folder, ignore_errors=True)
                incoming = self._jobs_dir / f".{uuid.uuid4().hex}"
                self._jobs_dir.mkdir(mode=0o700, exist_ok=True)
                try:
                    await fetch_directory(address, self._shared, remote, incoming, JOB_DATA)
                    incoming.rename(folder)
                finally:
                    shutil.rmtree(incoming, ignore_errors=True)
        return folder

    async def forget_job(self, job_id: str, leases_only: bool) -> None:
        """Drop the job's leases here, and its snapshots and folder unless it may come back (`leases_only`)."""
        for holder in [holder for holder in self._held if holder.startswith(f"job {job_id} ")]:
            self._held.pop(holder).release()
        if leases_only:
            return
        await asyncio.to_thread(_forget_snapshots, self._store(), job_id, 0)
        await asyncio.to_thread(shutil.rmtree, self._jobs_dir / job_id, ignore_errors=True)

    async def forget(self, names: list[Name]) -> None:
        """Remove this node's copies of what home has deleted, whoever they were made for. What is still read stays
        until its last reader has left, and may be evicted then."""
        async with self._copying:
            store = self._store()
            for name in names:
                stored = await asyncio.to_thread(store.find, *name)
                if stored is None:
                    continue
                for holder in [holder for holder, lease in self._held.items() if lease.path == stored.path]:
                    self._held.pop(holder).release()
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(store.remove, stored)

    async def idle_bytes(self) -> tuple[int, int]:
        """Bytes of freed segments, and of copies that nobody reads and that may be evicted."""
        store = self._store()
        return (await asyncio.to_thread(store.usage)).pool_bytes, await asyncio.to_thread(store.evictable_bytes)

    async def trim_pool(self) -> int:
        """Give the freed segments back to the host; returns their bytes."""
        return await asyncio.to_thread(self._store().trim_pool, 0)

    async def evict(self, nbytes: int) -> int:
        """Give back this many bytes of what nobody reads, if there are as many; returns the bytes freed."""
        return await asyncio.to_thread(self._store().evict, nbytes)

    async def _found_or_fetched(
        self, store: WeightStore, address: tuple[str, int], name: Name, remote: Path, *, pinned: bool
    ) -> tuple[StoredVersion, int]:
        """What `store` has, or what it makes of the directory received into it, and the bytes received. Call it holding
        `_copying`, so that two callers who want the same fetch it once."""
        stored = await asyncio.to_thread(store.find, *name)
        if stored is not None:
            return stored, 0
        incoming = store.root / "incoming" / uuid.uuid4().hex
        try:
            received_bytes = await fetch_directory(address, self._shared, remote, incoming)
            return await asyncio.to_thread(_import, store, incoming, name, pinned), received_bytes
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            received = sum(file.stat().st_size for file in incoming.glob("*"))
            raise await asyncio.to_thread(store.full, received) from error
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _store(self) -> WeightStore:
        return WeightStore(self._shm_root, budget_bytes=self._budget_bytes)


def _import(store: WeightStore, directory: Path, name: Name, pinned: bool) -> StoredVersion:
    return store.import_dir(directory, kind=name.kind, model=name.model, version=name.version, pinned=pinned)


def _forget_snapshots(store: WeightStore, job_id: str, keep: int) -> None:
    """Remove the job's snapshots except the newest `keep`."""
    of_job = [stored for stored in store.list("snapshot") if stored.model == job_id]
    of_job.sort(key=lambda stored: step_of(stored.version), reverse=True)
    for stored in of_job[keep:]:
        with contextlib.suppress(StoreError):  # a copy to disk leases it: removed next time
            store.remove(stored)
