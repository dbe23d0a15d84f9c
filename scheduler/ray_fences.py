"""Leases as Ray sees them: a placement group over the custom resources `device:<id>` of exactly the lease's devices."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from scheduler.effects import Detail
from scheduler.errors import EffectFailed
from scheduler.inventory import Holder, Lease

FENCE_TIMEOUT_S = 30.0
DEVICE_RESOURCE = "device:"


class Fences:
    """Ray gives a device to one placement group at a time, whoever asks: the last line behind the ledger."""

    def __init__(self) -> None:
        self._fences: dict[str, Any] = {}

    async def acquire(self, lease: Lease) -> Detail:
        table = await _table()
        if lease.id in table:
            return None
        bundles = [{f"{DEVICE_RESOURCE}{device_id}": 1} for device_id in lease.device_ids]
        fence = placement_group(bundles, strategy="PACK", name=lease.id, lifetime="detached")
        # Not `fence.ready()`: that runs a task, for which Ray first starts a worker process.
        if not await asyncio.to_thread(fence.wait, FENCE_TIMEOUT_S):
            remove_placement_group(fence)
            raise EffectFailed("acquire", lease.id, f"Ray did not give {lease.device_ids} in {FENCE_TIMEOUT_S:.0f} s")
        self._fences[lease.id] = fence
        return {"devices": list(lease.device_ids)}

    async def release(self, lease_id: str) -> Detail:
        fence = self._fences.pop(lease_id, None)
        if fence is None:
            if lease_id not in await _table():
                return None
            fence = ray.util.get_placement_group(lease_id)
        remove_placement_group(fence)
        # Removal is asynchronous; the next holder's acquire would only wait, but "released" must be true.
        async with asyncio.timeout(FENCE_TIMEOUT_S):
            while lease_id in await _table():
                await asyncio.sleep(0.005)
        return None

    async def leases(self) -> tuple[Lease, ...]:
        """Every lease that is fenced now, whoever acquired it."""
        return tuple(_lease(name, bundles) for name, bundles in (await _table()).items())


async def _table() -> dict[str, list[dict[str, float]]]:
    """Living placement groups: name to bundles."""
    table = await asyncio.to_thread(placement_group_table)
    return {
        entry["name"]: list(entry["bundles"].values())
        for entry in table.values()
        if entry["state"] in ("CREATED", "PENDING", "RESCHEDULING") and entry["name"]
    }


def _lease(name: str, bundles: list[dict[str, float]]) -> Lease:
    _, kind, holder_id = name.split(":", 2)
    devices = tuple(
        key.removeprefix(DEVICE_RESOURCE) for bundle in bundles for key in bundle if key.startswith(DEVICE_RESOURCE)
    )
    return Lease(name, Holder(kind, holder_id), devices)
