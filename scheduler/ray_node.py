"""One node of the box, as an actor pinned to it: where things are there, its warm parents, its relay, its copies.

A box of one node has just this one, at home beside the controller. Engines and ranks do not live in it: it may die
and be started again while they go on.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.node import NodeAgent, WarmSpec
from runtime.relay import Relay, Tunnels, fetch_directory
from scheduler.device_health import Reading
from scheduler.device_readings import DeviceReadings
from scheduler.inventory import Device
from weights.lease import Lease
from weights.store import WeightStore

NODE = "node:"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node keeps what. `address`: this node's own on the network of the nodes; loopback where it is alone."""

    name: str
    address: str
    devices: tuple[Device, ...]
    run_dir: Path
    log_dir: Path
    shm_root: Path
    warm: tuple[WarmSpec, ...]
    token_path: Path
    budget_bytes: int | None = None

    def socket_path(self, replica_id: str) -> Path:
        return self.run_dir / "r" / f"{replica_id}.sock"

    def warm_socket(self, name: str) -> str:
        return next(spec.socket_path for spec in self.warm if spec.name == name)


class Node(NodeAgent):
    """Body of the actor `node:<name>`."""

    def __init__(self, place: Place):
        super().__init__(list(place.warm))
        self._place = place
        token = place.token_path.read_bytes()
        self._relay = Relay(place.address, token, sockets=place.run_dir / "r", folders=(place.shm_root,))
        self._tunnels, self._token = Tunnels(token), token
        self._health = DeviceReadings(place.devices)
        self._copying = asyncio.Lock()
        self._held: dict[str, Lease] = {}

    async def place(self) -> Place:
        return self._place

    async def readings(self) -> tuple[Reading, ...]:
        """The health of this node's GPUs; empty on a node without."""
        return await asyncio.to_thread(self._health.read)

    async def relay_address(self) -> tuple[str, int]:
        """Where other nodes reach this one's engines and versions; opened by the first who asks."""
        return await self._relay.start()

    async def open_tunnel(self, local: Path, address: tuple[str, int], remote: Path) -> None:
        """From now on the socket `local` of this node leads to the engine at `remote` on the node at `address`."""
        await self._tunnels.open(local, address, remote)

    async def close_tunnel(self, local: Path) -> None:
        await self._tunnels.close(local)

    async def copy_version(self, address: tuple[str, int], model: str, version: str, remote: Path) -> dict[str, Any]:
        """Have this version in this node's shared memory: `{"path", "bytes", "seconds"}`, bytes 0 if it was there.

        It is compared with its checksums before it can be found, and stays leased until another version of the model
        is asked for. Raises RelayRefused, weights' errors, OSError.
        """
        began_s = time.monotonic()
        async with self._copying:
            store = WeightStore(self._place.shm_root, budget_bytes=self._place.budget_bytes)
            stored, received_bytes = await asyncio.to_thread(store.find, "version", model, version), 0
            if stored is None:
                incoming = self._place.shm_root / "incoming" / uuid.uuid4().hex
                try:
                    received_bytes = await fetch_directory(address, self._token, remote, incoming)
                    stored = await asyncio.to_thread(store.import_dir, incoming, model=model, version=version)
                finally:
                    shutil.rmtree(incoming, ignore_errors=True)
            old = self._held.get(model)
            self._held[model] = store.lease(stored)
            if old is not None:
                old.release()
        return {"path": stored.path, "bytes": received_bytes, "seconds": time.monotonic() - began_s}
