"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted. And lost
nodes, whose devices users see until the nodes return or an admin forgets them; the scheduler never does.

A row goes by the device's UUID, where it has one: when a GPU drops off the bus, the driver numbers those behind it
again. Here rows are by device id, "<node>/<index>"; that of a device which is not there is by its UUID.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from appliance.store.database import Database
from appliance.store.records import box
from appliance.store.rows import columns
from runtime.devices.kind import Reading
from scheduler.core.inventory import CORDONED as LOOP_SAYS

CORDONS = "device_cordons"
IDENTITIES = "device_identities"
"""UUIDs by device id, as the nodes found them last."""


class Cordon(TypedDict):
    """drain: {"reason", "by", "since_s"} by a person. fault: why the box cordoned the device; "" if it did not.
    retry_s: when the box tries it again; None: it waits for a person."""

    drain: dict[str, Any] | None
    fault: str
    retry_s: float | None


NONE = Cordon(drain=None, fault="", retry_s=None)


def read(db: Database) -> dict[str, Cordon]:
    ids = {uuid: device_id for device_id, uuid in box.get(db, IDENTITIES, {}).items()}
    return {ids.get(name, name): row for name, row in box.get(db, CORDONS, {}).items()}


def write(db: Database, rows: Mapping[str, Cordon]) -> None:
    uuids = box.get(db, IDENTITIES, {})
    box.put(db, CORDONS, {uuids.get(device_id, device_id): row for device_id, row in rows.items()})


def faulty(rows: Mapping[str, Cordon]) -> set[str]:
    """Those that the box cordoned."""
    return {device_id for device_id, row in rows.items() if row["fault"]}


def cordoned(db: Database) -> list[str]:
    return sorted(read(db))


def drained(db: Database) -> frozenset[str]:
    """Those that a person drained."""
    return frozenset(device_id for device_id, row in read(db).items() if row["drain"])


def drain(db: Database, device_id: str, reason: str, by: str, now_s: float) -> bool:
    """Ask the device's holder to leave. False if it was cordoned already; a new reason replaces the old one."""
    with db.transaction():
        rows = read(db)
        row = rows.get(device_id, NONE)
        since_s = row["drain"]["since_s"] if row["drain"] else now_s
        write(db, {**rows, device_id: {**row, "drain": {"reason": reason, "by": by, "since_s": since_s}}})
        return row is NONE


def undrain(db: Database, device_id: str) -> None:
    """Return the device to use; a person or the box cordoned it."""
    with db.transaction():
        rows = read(db)
        rows.pop(device_id, None)
        write(db, rows)


def follow(db: Database, node: str, present: Mapping[str, str]) -> None:
    """Keep the UUIDs of a node's devices. present: UUID by id, of those that have one or are silent (""), which are
    taken for those that had their ids."""
    with db.transaction():
        known = box.get(db, IDENTITIES, {})
        now = {device_id: uuid or known.get(device_id, "") for device_id, uuid in present.items()}
        others = {device_id: uuid for device_id, uuid in known.items() if not device_id.startswith(f"{node}/")}
        box.put(db, IDENTITIES, others | {device_id: uuid for device_id, uuid in now.items() if uuid})


def shown(rows: Mapping[str, Cordon], device: dict[str, Any]) -> dict[str, Any]:
    """A device with its health from the store, `drain` (None without one), and `cordon`: what keeps it out of
    use, "person" or "box"; None for what is not said here (its node leaves)."""
    row = rows.get(device["id"])
    if row is None:
        # The loop's view lags: a device that was just put back still drains in it.
        lags = device["health"] == "draining" and device.get("health_reason") == LOOP_SAYS
        back = {"health": "ok", "health_reason": ""} if lags else {}
        return {**device, **back, "drain": None, "cordon": None}
    by_person, why = row["drain"], row["fault"]
    if by_person:
        why = f"drained by {by_person['by']}" + (f": {by_person['reason']}" if by_person["reason"] else "")
    elif row["retry_s"] is not None:
        why += f"; it is tried again in {max(0.0, row['retry_s'] - time.time()):.0f} s"
    return {
        **device,
        "health": "draining" if device["health"] == "ok" else device["health"],
        "health_reason": why,
        "drain": by_person,
        "cordon": "person" if by_person else "box",
    }


# --- nodes

NODES = "joined_nodes"
_SHOWN = ("id", "node", "index", "kind", "name", "memory_bytes")
_METERS = (
    "temperature_c slowdown_c power_w power_limit_w energy_j busy memory_used_bytes clock_hz throttled "
    "ecc_uncorrected at_s"
)


def joined(db: Database, node: str, devices: Sequence[dict[str, Any]]) -> bool:
    """The node is present. False when that was known: a new controller meets the nodes of its predecessor.

    devices: as `Scheduler.status` has them.
    """
    with db.transaction():
        known = box.get(db, NODES, {})
        row = {"devices": [{name: device[name] for name in _SHOWN} for device in devices], "lost": None}
        box.put(db, NODES, {**known, node: row})
        return node not in known or known[node]["lost"] is not None


def left(db: Database, node: str) -> None:
    """The node left in order and is not expected back."""
    with db.transaction():
        box.put(db, NODES, {name: row for name, row in box.get(db, NODES, {}).items() if name != node})


def lost(db: Database, node: str, reason: str, now_s: float) -> None:
    """The node is gone without notice. Unix time."""
    with db.transaction():
        known = box.get(db, NODES, {})
        if node in known:
            box.put(db, NODES, {**known, node: {**known[node], "lost": {"since_s": now_s, "reason": reason}}})


def missed(db: Database, present: Collection[str]) -> list[str]:
    """Expected nodes that are not among `present` and not already recorded as lost."""
    return [name for name, row in box.get(db, NODES, {}).items() if row["lost"] is None and name not in present]


def forget(db: Database, node: str) -> list[str] | None:
    """Hide a lost node's devices and delete their cordons. Returns their ids; None when the node is not lost."""
    with db.transaction():
        row = box.get(db, NODES, {}).get(node)
        if row is None or row["lost"] is None:
            return None
        ids = [device["id"] for device in row["devices"]]
        for device_id in ids:
            undrain(db, device_id)
        left(db, node)
        return ids


def in_view(db: Database, there: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All devices shown to users: present ones with their cordons, then those of lost nodes.

    `lost`: {"reason", "since_s"} or None; `health` is "lost" where it is not None.
    """
    away = {name: row for name, row in box.get(db, NODES, {}).items() if row["lost"] is not None}
    rows = read(db)
    found = [{**shown(rows, device), "lost": None} for device in there if device["node"] not in away]
    for _, node in sorted(away.items()):
        since = {"health": "lost", "health_reason": node["lost"]["reason"], "holder": None, "lost": node["lost"]}
        for device in node["devices"]:
            drain = rows.get(device["id"], NONE)["drain"]
            found.append({**device, **since, "drain": drain, "cordon": None})
    return found


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Each device with `meters`, by the names of `runtime.devices.kind.Reading`; None of one that tells nothing."""
    meters = {name: columns(reading, _METERS) for name, reading in readings.items()}
    return [{**device, "meters": meters.get(device["id"])} for device in devices]
