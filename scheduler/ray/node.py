"""The actor pinned to one node of the box. It has the node's configuration, warm parents, adapters for its engines, and
copies of other nodes' versions, adapters, snapshots and job data. A box of one node has only the actor of the home
node, next to the controller. Engines and ranks run outside it and continue when it dies and restarts. Rules for copies:
- The node that needs a copy reads it from the other node's agent in chunks, which travel through Ray's object store.
- A copy is verified against its checksums before it can be found.
- A copy stays leased for its holder ("serve <model>", "job <id> base") until the holder takes another copy or releases
  it, or home deletes the original.
- Copies at home are pinned until a tier has them. Other nodes may evict copies of data that home has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from runtime.devices.kind import Reading
from runtime.errors import CopyFailed, RuntimeLayerError
from runtime.processes.warm_parent import NodeAgent, WarmSpec
from scheduler.core.workload import Device
from scheduler.devices.discovery import HOME_NODE
from scheduler.devices.health import DeviceReadings
from scheduler.devices.host_reading import MemoryReading, read_memory
from scheduler.ray.actors import find_actor
from serve.core.adapter_source import AdapterServer, AdapterUnavailable, brought_in
from weights.format.errors import IntegrityError, StoreError, StoreFull, VersionNotFound, WeightsError
from weights.format.manifest import Manifest
from weights.format.names import Name, step_of
from weights.memory.lease import Lease, StoredVersion, unpin
from weights.memory.store import WeightStore
from weights.tiers.copies import take_in

NODE = "node:"
ADAPTER_TIMEOUT_S = 60.0
JOB_DATA = ("train.jsonl", "valid.jsonl", "tokens")
"""Files in a job's folder to copy."""
KEPT_SNAPSHOTS = 2
CHUNK_BYTES = 8 << 20  # at most two chunks per copy are in Ray's object store of 80 MiB at once


def stored_bytes(directory: Path) -> int | None:
    """Return the size of a version or snapshot by its manifest, for the history; None if it is unreadable."""
    try:
        return Manifest.read(directory).nbytes
    except (WeightsError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Paths and settings of a node. `address`: its address in the nodes' network; loopback on a box of one node.
    `jobs_dir`: folders of the jobs that run here. `numa_bind`: run processes on processors near their devices."""

    name: str
    address: str
    devices: tuple[Device, ...]
    run_dir: Path
    log_dir: Path
    shm_root: Path
    warm: tuple[WarmSpec, ...]
    jobs_dir: Path
    budget_bytes: int | None = None
    numa_bind: bool = True

    @property
    def adapter_socket(self) -> Path:
        """The socket on which this node's engines request adapters."""
        return self.run_dir / "adapters.sock"

    @property
    def adapters(self) -> Path:
        """The directory in which this node's engines look for adapters first."""
        return self.shm_root / "adapters"

    def socket_path(self, replica_id: str) -> Path:
        return self.run_dir / "r" / f"{replica_id}.sock"

    def numa_nodes(self, devices: Iterable[Device]) -> tuple[int | None, ...]:
        """Return the NUMA node for each device's process; None: any node."""
        return tuple(device.numa_node if self.numa_bind else None for device in devices)

    def warm_socket(self, name: str) -> str:
        return next(spec.socket_path for spec in self.warm if spec.name == name)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's report, polled every second. leaves: True if nothing new may start there. memory: of its host."""

    leaves: bool
    memory: MemoryReading


class Node(NodeAgent):
    """Methods of the actor `node:<name>`. `source`: the agent of the node to copy from."""

    def __init__(self, node_config: NodeConfig):
        super().__init__(list(node_config.warm))
        self._config, self._jobs_dir = node_config, node_config.jobs_dir
        self._store = WeightStore(node_config.shm_root, budget_bytes=node_config.budget_bytes)
        self._copying = asyncio.Lock()
        self._held: dict[str, Lease] = {}
        self._health = DeviceReadings(node_config.devices)
        self._adapters: AdapterServer | None = None
        self._leaves = False

    async def start(self) -> None:
        """Start the warm parents and, except at home, the adapter server; at home the controller serves adapters."""
        await super().start()
        if self._config.name != HOME_NODE and self._adapters is None:
            refusals = (AdapterUnavailable, RuntimeLayerError, WeightsError, OSError)
            self._adapters = AdapterServer(self._config.adapter_socket, self._adapter, refusals)
            await self._adapters.start()

    async def config(self) -> NodeConfig:
        return self._config

    async def leave(self) -> None:
        """Mark this node as leaving: nothing new may start here, and all processes must move to other nodes."""
        self._leaves = True

    async def end(self) -> None:
        """End Ray and all its processes on this node, because the node was removed from the box."""
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet: all its processes, including this actor, die with it

    async def report(self) -> NodeReport:
        return NodeReport(self._leaves, await asyncio.to_thread(read_memory))

    async def readings(self, released: Collection[str]) -> tuple[Reading, ...]:
        """The health of this node's GPUs, except the `released` device ids; empty without GPUs."""
        return await self._health.look(released)

    async def _adapter(self, model: str, version: str) -> Lease:
        home = find_actor(NODE + HOME_NODE)
        if home is None:
            raise AdapterUnavailable(f"{model}@{version}: the box does not answer")
        try:
            remote = await home.bring_adapter.remote(f"{model}@{version}")
        except RayError as error:
            raise AdapterUnavailable(str(getattr(error, "cause", None) or error)) from error
        return await self.leased(home, Name("adapter", model, version), remote)

    async def bring_adapter(self, adapter: str) -> Path:
        """At home: have the controller bring "NAME@VERSION" into shared memory. Raises AdapterUnavailable."""
        async with brought_in(str(self._config.adapter_socket), adapter, ADAPTER_TIMEOUT_S) as path:
            return Path(path)

    # --- copies

    async def files(self, directory: Path) -> list[str]:
        """Return the names of the files in and below a directory of this node. Raises FileNotFoundError."""
        directory = directory.resolve(strict=True)
        return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())

    async def read(self, path: Path, offset: int) -> bytes:
        """Return the next chunk of a file of this node; empty at the end of the file."""
        return await asyncio.to_thread(_chunk, path, offset)

    async def take(self, source: Any, name: Name, remote: Path, holder: str) -> Path:
        """Lease `name` for `holder` in this node's shared memory, copying it from `remote` if missing. Returns its
        path. Raises CopyFailed, weights' errors, OSError."""
        lease = await self.leased(source, name, remote)
        old, self._held[holder] = self._held.get(holder), lease
        if old is not None:
            old.release()
        return lease.path

    async def leased(self, source: Any, name: Name, remote: Path) -> Lease:
        """Return a lease on this node's copy; copy it first if it is missing. Raises like `take`."""
        store = self._store
        async with self._copying:
            return store.lease(await self._found_or_copied(store, source, name, remote, pinned=False))

    async def keep(self, source: Any, name: Name, remote: Path) -> Path:
        """At home: copy another node's result here and pin it; return its path. A snapshot that does not fit in shared
        memory goes to the job's store on disk, like snapshots of ranks at home. Raises like `take`."""
        store = self._store
        async with self._copying:
            try:
                stored = await self._found_or_copied(store, source, name, remote, pinned=True)
            except StoreFull:
                if name.kind != "snapshot":
                    raise
                store = WeightStore(self._jobs_dir / name.model / "snapshots", budget_bytes=None)
                stored = await self._found_or_copied(store, source, name, remote, pinned=True)
            if name.kind == "snapshot":
                await asyncio.to_thread(_forget_snapshots, store, name.model, KEPT_SNAPSHOTS)
        return stored.path

    async def unpin(self, path: Path) -> None:
        """Unpin the version at `path`, because home has a copy."""
        with contextlib.suppress(VersionNotFound, IntegrityError):
            unpin(StoredVersion.read(path))

    async def take_job(self, source: Any, remote: Path) -> Path:
        """Return the path of the job's folder here; copy its data from `remote` if missing. Raises like `take`."""
        folder = self._jobs_dir / remote.name
        async with self._copying:
            if not folder.exists():
                incoming = self._jobs_dir / f".{uuid.uuid4().hex}"
                try:
                    await copy_directory(source, remote, incoming, JOB_DATA)
                    incoming.rename(folder)
                finally:
                    shutil.rmtree(incoming, ignore_errors=True)
        return folder

    async def forget_job(self, job_id: str, leases_only: bool) -> None:
        """Release the job's leases here; unless `leases_only` (the job may return), delete its snapshots and folder."""
        for holder in [holder for holder in self._held if holder.startswith(f"job {job_id} ")]:
            self._held.pop(holder).release()
        if leases_only:
            return
        await asyncio.to_thread(_forget_snapshots, self._store, job_id, 0)
        await asyncio.to_thread(shutil.rmtree, self._jobs_dir / job_id, ignore_errors=True)

    async def holds_jobs(self) -> bool:
        """Whether a job runs here or has results that are not yet copied home."""
        return any(holder.startswith("job ") for holder in self._held)

    async def forget(self, names: list[Name]) -> None:
        """Remove this node's copies of names that home has deleted, despite their holders. A copy with readers stays
        until its last reader closes it, and may be evicted then."""
        async with self._copying:
            store = self._store
            for name in names:
                stored = await asyncio.to_thread(store.find, *name)
                if stored is None:
                    continue
                for holder in [holder for holder, lease in self._held.items() if lease.path == stored.path]:
                    self._held.pop(holder).release()
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(store.remove, stored)

    async def of_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of this node's store: `idle_bytes`, or `evict` with a number of bytes."""
        return await asyncio.to_thread(getattr(self._store, method), *arguments)

    async def _found_or_copied(
        self, store: WeightStore, source: Any, name: Name, remote: Path, *, pinned: bool
    ) -> StoredVersion:
        """Return the version in `store`; copy it there first if missing. Callers hold the lock `_copying`, so that
        concurrent callers copy only once."""
        stored = await asyncio.to_thread(store.find, *name)
        if stored is not None:
            return stored
        incoming = store.root / "incoming" / uuid.uuid4().hex
        try:
            await copy_directory(source, remote, incoming)
            return await asyncio.to_thread(take_in, store, incoming, pinned=pinned)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            copied = sum(file.stat().st_size for file in incoming.glob("*"))
            raise await asyncio.to_thread(store.full, copied) from error
        finally:
            shutil.rmtree(incoming, ignore_errors=True)


async def copy_directory(source: Any, remote: Path, target: Path, names: Sequence[str] | None = None) -> None:
    """Copy another node's directory into the new directory `target`. names: top-level files and folders to copy; None:
    all. Raises CopyFailed, OSError."""
    try:
        listed = await source.files.remote(remote)
        target.mkdir(mode=0o700, parents=True)
        for name in listed if names is None else [name for name in listed if Path(name).parts[0] in names]:
            (target / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(target / name, "xb") as file:
                offset, coming = 0, source.read.remote(remote / name, 0)
                while coming is not None:
                    chunk = await coming
                    offset += len(chunk)
                    # Fetch the next chunk while writing this chunk, but stop at a short chunk: sealing replaces a
                    # manifest by a longer one.
                    coming = source.read.remote(remote / name, offset) if len(chunk) == CHUNK_BYTES else None
                    await asyncio.to_thread(file.write, chunk)
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise CopyFailed(f"{remote} could not be copied from its node: {cause}") from error


def _chunk(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def _forget_snapshots(store: WeightStore, job_id: str, keep: int) -> None:
    """Remove the job's snapshots except the newest `keep`."""
    of_job = [stored for stored in store.list("snapshot") if stored.model == job_id]
    of_job.sort(key=lambda stored: step_of(stored.version), reverse=True)
    for stored in of_job[keep:]:
        with contextlib.suppress(StoreError):  # a copy to disk leases it: removed next time
            store.remove(stored)
