"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted.

One row by device id, "<node>/<index>". It follows the device by its UUID: when one drops off the bus, the driver
numbers those behind it again. The row of a device that is not there is kept under its UUID until it is back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypedDict

from appliance.store.database import Database
from appliance.store.records import box
from scheduler.core.inventory import CORDONED as LOOP_SAYS

CORDONS = "device_cordons"
IDENTITIES = "device_identities"


class Cordon(TypedDict):
    """drain: {"reason", "by", "since_s"} by a person. fault: why the box cordoned the device; "" if it did not.
    retry_s: when the box tries it again; None: it waits for a person. uuid: "" of a device that has none."""

    uuid: str
    drain: dict[str, Any] | None
    fault: str
    retry_s: float | None


def read(db: Database) -> dict[str, Cordon]:
    """All rows, by device id."""
    return box.get(db, CORDONS, {})


def write(db: Database, rows: Mapping[str, Cordon]) -> None:
    box.put(db, CORDONS, rows)


def is_cordoned(row: Cordon | None) -> bool:
    return row is not None and bool(row["drain"] or row["fault"])


def faulty(rows: Mapping[str, Cordon]) -> set[str]:
    """Those that the box cordoned."""
    return {device_id for device_id, row in rows.items() if row["fault"]}


def cordoned(db: Database) -> list[str]:
    return sorted(device_id for device_id, row in read(db).items() if is_cordoned(row))


def drained(db: Database) -> frozenset[str]:
    """Those that a person drained."""
    return frozenset(device_id for device_id, row in read(db).items() if row["drain"])


def new_row(db: Database, device_id: str) -> Cordon:
    return Cordon(uuid=box.get(db, IDENTITIES, {}).get(device_id, ""), drain=None, fault="", retry_s=None)


def drain(db: Database, device_id: str, reason: str, by: str, now_s: float) -> bool:
    """Ask the device's holder to leave. False if it was cordoned already; a new reason replaces the old one."""
    with db.transaction():
        rows = read(db)
        row = rows.get(device_id) or new_row(db, device_id)
        since_s = row["drain"]["since_s"] if row["drain"] else now_s
        write(db, {**rows, device_id: {**row, "drain": {"reason": reason, "by": by, "since_s": since_s}}})
        return not is_cordoned(row)


def undrain(db: Database, device_id: str) -> bool:
    """Return the device to use, whoever cordoned it. False if it was not cordoned."""
    with db.transaction():
        rows = read(db)
        row = rows.pop(device_id, None)
        write(db, rows)
        return is_cordoned(row)


def follow(db: Database, node: str, present: Mapping[str, str]) -> dict[str, str]:
    """Keep all rows with their devices. present: UUID by id, of this node's devices that have one or are silent (""),
    which are taken for those that had their ids. Returns the UUIDs of devices that were there the last time and are not
    now, by the id they had."""
    with db.transaction():
        known = box.get(db, IDENTITIES, {})
        mine = {device_id: uuid for device_id, uuid in known.items() if device_id.startswith(f"{node}/")}
        now = {device_id: uuid or mine.get(device_id, "") for device_id, uuid in present.items()}
        ids = {uuid: device_id for device_id, uuid in now.items() if uuid}
        gone = {device_id: uuid for device_id, uuid in mine.items() if uuid not in ids}
        rows = {}
        for name, row in read(db).items():
            absent = (name in gone and row["uuid"]) or name
            rows[ids.get(row["uuid"], absent)] = row
        write(db, rows)
        others = {device_id: uuid for device_id, uuid in known.items() if device_id not in mine}
        box.put(db, IDENTITIES, others | {device_id: uuid for uuid, device_id in ids.items()})
    return gone


def shown(rows: Mapping[str, Cordon], device: dict[str, Any]) -> dict[str, Any]:
    """A device with its health from the store, `drain` (None if nobody drained it), and `cordon`: what keeps it out of
    use, "person" or "box"; None for what is not said here (its node leaves)."""
    row = rows.get(device["id"])
    if row is None or not is_cordoned(row):
        # The loop's view lags: a device that was just put back still drains in it.
        lags = device["health"] == "draining" and device.get("health_reason") == LOOP_SAYS
        back = {"health": "ok", "health_reason": ""} if lags else {}
        return {**device, **back, "drain": None, "cordon": None}
    drained_by, why = row["drain"], row["fault"]
    if why and row["retry_s"] is not None:
        why += f"; it is tried again in {max(0.0, row['retry_s'] - time.time()):.0f} s"
    if drained_by:
        why = f"drained by {drained_by['by']}" + (f": {drained_by['reason']}" if drained_by["reason"] else "")
    return {
        **device,
        "health": "draining" if device["health"] == "ok" else device["health"],
        "health_reason": why,
        "drain": drained_by,
        "cordon": "person" if drained_by else "box",
    }
