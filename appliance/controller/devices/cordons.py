"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted.

They are kept by device id, "<node>/<index>", and follow the device by its UUID: when one drops off the bus, the driver
numbers those behind it again. What is said of a device that is not there is kept under its UUID until it is back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.store.database import Database
from appliance.store.records import box
from scheduler.core.inventory import CORDONED as LOOP_SAYS

CORDONED = "cordoned_devices"
DRAINS = "drained_devices"
FAILING = "cordon_reasons"
TRIALS = "device_trials"
IDENTITIES = "device_identities"


def drain(db: Database, device_id: str, reason: str, by: str, now_s: float) -> bool:
    """Ask the device's holder to leave. False if it was drained already; a new reason replaces the old one."""
    with db.transaction():
        drains, cordoned = box.get(db, DRAINS, {}), box.get(db, CORDONED, [])
        fresh = device_id not in cordoned
        since_s = drains.get(device_id, {}).get("since_s", now_s)
        box.put(db, DRAINS, {**drains, device_id: {"reason": reason, "by": by, "since_s": since_s}})
        box.put(db, CORDONED, sorted({*cordoned, device_id}))
        return fresh


def undrain(db: Database, device_id: str) -> bool:
    """Return the device to use, whoever cordoned it. False if it was not cordoned."""
    with db.transaction():
        drains, cordoned = box.get(db, DRAINS, {}), box.get(db, CORDONED, [])
        drains.pop(device_id, None)
        box.put(db, DRAINS, drains)
        box.put(db, CORDONED, [d for d in cordoned if d != device_id])
        return device_id in cordoned


def renamed(known: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """Under which name what was said of a device is to be kept now, by its name so far.

    known, present: UUIDs of one node's devices by id, then and now; "" of one that does not answer, which is taken for
    the one that had its id.
    """
    there = {uuid: device_id for device_id, uuid in present.items() if uuid}
    back = dict(there)
    gone = {
        device_id: there.get(uuid, uuid)
        for device_id, uuid in known.items()
        if there.get(uuid) != device_id and (uuid in there or present.get(device_id) != "")
    }
    return back | gone


def follow(db: Database, node: str, present: Mapping[str, str]) -> dict[str, str]:
    """Keep all cordons with their devices. present: UUID by id, of this node's devices that have one or are silent.
    Returns the UUIDs of devices that were there the last time and are not now, by the id they had."""
    with db.transaction():
        all_known = box.get(db, IDENTITIES, {})
        known = {device_id: uuid for device_id, uuid in all_known.items() if device_id.startswith(f"{node}/")}
        names = renamed(known, present)
        box.put(db, CORDONED, sorted(names.get(name, name) for name in box.get(db, CORDONED, [])))
        for table in (DRAINS, FAILING, TRIALS):
            box.put(db, table, {names.get(name, name): record for name, record in box.get(db, table, {}).items()})
        now = {device_id: uuid or known.get(device_id, "") for device_id, uuid in present.items()}
        rest = {device_id: uuid for device_id, uuid in all_known.items() if device_id not in known}
        box.put(db, IDENTITIES, {**rest, **{device_id: uuid for device_id, uuid in now.items() if uuid}})
    return {device_id: uuid for device_id, uuid in known.items() if uuid not in now.values()}


@dataclass(frozen=True, slots=True)
class Cordons:
    """All cordons from one read of the store, by device id. `drains`: {"reason", "by", "since_s"} of devices that a
    person drained; `failing`: why the scheduler cordoned one; `trials`: {"cordons", "at_s"} of those that it will try
    again by itself."""

    drains: dict[str, dict[str, Any]]
    failing: dict[str, str]
    trials: dict[str, dict[str, Any]]
    cordoned: frozenset[str]

    def shown(self, device: dict[str, Any]) -> dict[str, Any]:
        """A device with its health from the store, `drain` (None if nobody drained it), and `cordon`: what keeps it out
        of use, "person" or "box"; None for what is not said here (its node leaves)."""
        if device["id"] not in self.cordoned:
            # The loop's view lags: a device that was just put back still drains in it.
            lags = device["health"] == "draining" and device.get("health_reason") == LOOP_SAYS
            back = {"health": "ok", "health_reason": ""} if lags else {}
            return {**device, **back, "drain": None, "cordon": None}
        drained, why = self.drains.get(device["id"]), self.failing.get(device["id"])
        cordon = "person" if drained else "box"
        if why and (trial := self.trials.get(device["id"])) is not None:
            why += f"; it is tried again in {max(0.0, trial['at_s'] - time.time()):.0f} s"
        health = "draining" if device["health"] == "ok" else device["health"]
        if drained:
            why = f"drained by {drained['by']}" + (f": {drained['reason']}" if drained["reason"] else "")
        reason = why or device.get("health_reason", "")
        return {**device, "health": health, "health_reason": reason, "drain": drained, "cordon": cordon}


def read(db: Database) -> Cordons:
    return Cordons(
        box.get(db, DRAINS, {}),
        box.get(db, FAILING, {}),
        box.get(db, TRIALS, {}),
        frozenset(box.get(db, CORDONED, [])),
    )
