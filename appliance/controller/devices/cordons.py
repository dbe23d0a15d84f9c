"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from appliance.store.database import Database
from appliance.store.records import box

CORDONED = "cordoned_devices"
DRAINS = "drained_devices"
FAILING = "cordon_reasons"
TRIALS = "device_trials"


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
        """A device with `drain` (None if nobody drained it) and its health from the store."""
        if device["id"] not in self.cordoned:
            # The loop's view lags: a device that was just put back still drains in it.
            back = {"health": "ok", "health_reason": ""} if device["health"] == "draining" else {}
            return {**device, **back, "drain": None}
        drained, told = self.drains.get(device["id"]), self.failing.get(device["id"])
        if told and (trial := self.trials.get(device["id"])) is not None:
            told += f"; it is tried again in {max(0.0, trial['at_s'] - time.time()):.0f} s"
        health = "draining" if device["health"] == "ok" else device["health"]
        if drained:
            told = f"drained by {drained['by']}" + (f": {drained['reason']}" if drained["reason"] else "")
        return {**device, "health": health, "health_reason": told or device.get("health_reason", ""), "drain": drained}


def read(db: Database) -> Cordons:
    with db.transaction():
        return Cordons(
            box.get(db, DRAINS, {}),
            box.get(db, FAILING, {}),
            box.get(db, TRIALS, {}),
            frozenset(box.get(db, CORDONED, [])),
        )
