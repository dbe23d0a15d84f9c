"""One node of the box, as an actor pinned to it: its configuration, warm parents, copies, and adapters for its engines.

A box of one node has only the home node's actor, beside the controller. Engines and ranks are not part of it: it may
die and restart while they continue.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError

from runtime.devices.kind import Reading
from runtime.errors import RuntimeLayerError
from runtime.processes.warm_parents import NodeAgent, WarmSpec
from scheduler.core.inventory import Device
from scheduler.devices.discovery import HOME_NODE
from scheduler.devices.host_reading import MemoryReading, read_memory
from scheduler.devices.readings import DeviceReadings
from scheduler.ray.actors import find_actor
from scheduler.ray.node_copies import NodeCopies
from serve.core.adapter_source import AdapterServer, AdapterUnavailable, brought_in
from weights.format.errors import WeightsError
from weights.format.manifest import Manifest
from weights.format.names import Name
from weights.memory.lease import Lease

NODE = "node:"
ADAPTER_TIMEOUT_S = 60.0


def stored_bytes(directory: Path) -> int | None:
    """Bytes of a version or snapshot by its manifest, for the history; None if it cannot be read."""
    try:
        return Manifest.read(directory).nbytes
    except (WeightsError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Paths and settings of a node. `address`: its own on the nodes' network, loopback if it is alone. `jobs_dir`:
    folders of the jobs that run here. `numa_bind`: processes run on the processors near their devices."""

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
        """The NUMA node on which the process of each of these devices must run; None: anywhere."""
        return tuple(device.numa_node if self.numa_bind else None for device in devices)

    def warm_socket(self, name: str) -> str:
        return next(spec.socket_path for spec in self.warm if spec.name == name)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node says of itself every second. leaves: nothing new may start there. memory: of its host."""

    leaves: bool
    memory: MemoryReading


class Node(NodeAgent, NodeCopies):
    """Body of the actor `node:<name>`."""

    def __init__(self, node_config: NodeConfig):
        NodeAgent.__init__(self, list(node_config.warm))
        NodeCopies.__init__(self, node_config.shm_root, node_config.jobs_dir, node_config.budget_bytes)
        self._config = node_config
        self._health = DeviceReadings(node_config.devices)
        self._adapters: AdapterServer | None = None
        self._leaves = False

    async def start(self) -> None:
        """Start the warm parents and, on other nodes than home, the source of adapters; at home the controller is
        that."""
        await super().start()
        if self._config.name != HOME_NODE and self._adapters is None:
            refusals = (AdapterUnavailable, RuntimeLayerError, WeightsError, OSError)
            self._adapters = AdapterServer(self._config.adapter_socket, self._adapter, refusals)
            await self._adapters.start()

    async def config(self) -> NodeConfig:
        return self._config

    async def leave(self) -> None:
        """From now on nothing new may start here, and everything that runs must move elsewhere."""
        self._leaves = True

    async def end(self) -> None:
        """End this node's Ray, and with it all that runs here: the node was removed from the box."""
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet: whatever it started dies with it, us included

    async def report(self) -> NodeReport:
        return NodeReport(self._leaves, await asyncio.to_thread(read_memory))

    async def readings(self, let_go: Collection[str]) -> tuple[Reading, ...]:
        """The health of this node's GPUs but of those to let go, by id; empty if it has none."""
        return await self._health.look(let_go)

    async def _adapter(self, model: str, version: str) -> Lease:
        home = find_actor(NODE + HOME_NODE)
        if home is None:
            raise AdapterUnavailable(f"{model}@{version}: the box does not answer")
        try:
            remote = await home.bring_adapter.remote(f"{model}@{version}")
        except RayError as error:
            raise AdapterUnavailable(str(getattr(error, "cause", None) or error)) from error
        return (await self.leased(home, Name("adapter", model, version), remote))[0]

    async def bring_adapter(self, adapter: str) -> Path:
        """At home: have the controller bring "NAME@VERSION" into shared memory. Raises AdapterUnavailable."""
        async with brought_in(str(self._config.adapter_socket), adapter, ADAPTER_TIMEOUT_S) as path:
            return Path(path)
