"""Reserves a lease's devices in Ray: a placement group over the custom resources `device:<id>` of exactly these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from scheduler.core.errors import EffectFailed
from scheduler.core.inventory import Holder, Lease
from scheduler.handover.effects import Detail

RESERVE_TIMEOUT_S = 30.0
AVAILABLE_TIMEOUT_S = 1.0
DEVICE_RESOURCE = "device:"


class DeviceReservations:
    """Ray gives a device to one placement group at a time, whoever asks: the last safeguard behind the ledger."""

    def __init__(self) -> None:
        self._reservations: dict[str, Any] = {}
        self._acquiring: set[str] = set()

    async def acquire(self, lease: Lease) -> Detail:
        state, _ = (await _table()).get(lease.id, ("", []))
        if state == "CREATED":
            return None
        if state:
            await self.release(lease.id)  # left by a caller who died or stopped waiting; its name would be taken
        bundles = [{f"{DEVICE_RESOURCE}{device_id}": 1} for device_id in lease.device_ids]
        group, given = placement_group(bundles, strategy="PACK", name=lease.id, lifetime="detached"), False
        self._acquiring.add(lease.id)
        try:
            # Not `group.ready()`, which runs a task that first needs a new Ray worker process.
            given = await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S)
        except Exception as error:  # Ray raises a bare error if `leases` removed the group because its node was lost
            raise EffectFailed("acquire", lease.id, str(error)) from error
        finally:
            self._acquiring.discard(lease.id)
            if not given:  # also after a cancelled wait: the group must not get the devices later
                remove_placement_group(group)
        if not given:
            raise EffectFailed("acquire", lease.id, f"Ray did not give {lease.device_ids} in {RESERVE_TIMEOUT_S:.0f} s")
        self._reservations[lease.id] = group
        return {"devices": list(lease.device_ids)}

    async def release(self, lease_id: str) -> Detail:
        group = self._reservations.pop(lease_id, None)
        _, devices = (await _table()).get(lease_id, ("", []))
        if not devices:
            return None
        # `leases` may release it at the same time, if its node was lost: the later call finds nothing.
        group = group or _found(lease_id)
        if group is not None:
            remove_placement_group(group)
        # Removal is asynchronous. The next acquire could simply wait, but "released" must be true on return.
        async with asyncio.timeout(RESERVE_TIMEOUT_S):
            while lease_id in await _table():
                await asyncio.sleep(0.005)
        await self._until_available([f"{DEVICE_RESOURCE}{device}" for device in devices])
        return None

    async def _until_available(self, devices: Collection[str]) -> None:
        """Returns when Ray would give the devices to the next caller, or when they are gone with their node.

        Ray's control store learns of freed resources from the node's report. It retries a placement group requested
        before that report only after most of a second.
        """
        until_s = time.monotonic() + AVAILABLE_TIMEOUT_S
        while time.monotonic() < until_s:
            available = await asyncio.to_thread(ray.available_resources)
            if all(available.get(device, 0.0) >= 1.0 for device in devices):
                return
            await asyncio.sleep(0.005)

    async def leases(self, present: Collection[str]) -> tuple[Lease, ...]:
        """Every lease that is reserved now, whoever acquired it, with those of its devices that are `present`.

        A lease that lost some devices with their node keeps the others until its holder releases them. A lease that
        lost all, or that a dead controller was waiting for, has no devices and is removed.
        """
        found = []
        for name, (state, devices) in (await _table()).items():
            devices = tuple(device for device in devices if device in present)
            if devices and (state != "PENDING" or name in self._acquiring):
                found.append(_lease(name, devices))
            else:
                await self.release(name)
        return tuple(found)


async def any_reserved(device_ids: Collection[str]) -> bool:
    """Whether any lease holds or waits for one of these devices."""
    return any(not set(device_ids).isdisjoint(devices) for _, devices in (await _table()).values())


def _found(lease_id: str) -> Any | None:
    try:
        return ray.util.get_placement_group(lease_id)
    except ValueError:
        return None


async def _table() -> dict[str, tuple[str, list[str]]]:
    """State and requested devices of each living placement group, by name."""
    table = await asyncio.to_thread(placement_group_table)
    return {
        entry["name"]: (entry["state"], [device for bundle in entry["bundles"].values() for device in _devices(bundle)])
        for entry in table.values()
        if entry["state"] in ("CREATED", "PENDING", "RESCHEDULING") and entry["name"]
    }


def _devices(bundle: dict[str, float]) -> list[str]:
    return [key.removeprefix(DEVICE_RESOURCE) for key in bundle if key.startswith(DEVICE_RESOURCE)]


def _lease(name: str, devices: tuple[str, ...]) -> Lease:
    _, kind, holder_id = name.split(":", 2)
    return Lease(name, Holder(kind, holder_id), devices)
