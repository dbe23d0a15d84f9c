"""Which nodes joined the box and which were lost, and the devices that users see.

The devices of a lost node stay visible, with time and reason, until it returns or an admin forgets it. The scheduler
never sees them: it plans only with present devices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from appliance.controller.devices import cordons
from appliance.store.database import Database
from appliance.store.records import box
from appliance.store.rows import columns
from runtime.devices.kind import Reading

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
            cordons.undrain(db, device_id)
        left(db, node)
        return ids


def in_view(db: Database, there: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All devices shown to users: present ones with their cordons, then those of lost nodes.

    `lost`: {"reason", "since_s"} or None; `health` is "lost" where it is not None.
    """
    lost_nodes = {name: row for name, row in box.get(db, NODES, {}).items() if row["lost"] is not None}
    rows = cordons.read(db)
    found = [{**cordons.shown(rows, device), "lost": None} for device in there if device["node"] not in lost_nodes]
    for _, node in sorted(lost_nodes.items()):
        since = {"health": "lost", "health_reason": node["lost"]["reason"], "holder": None, "lost": node["lost"]}
        for device in node["devices"]:
            drain = rows.get(device["id"], cordons.NONE)["drain"]
            found.append({**device, **since, "drain": drain, "cordon": None})
    return found


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Each device with `meters`, by the names of `runtime.devices.kind.Reading`; None of one that tells nothing."""
    shown = {name: columns(reading, _METERS) for name, reading in readings.items()}
    return [{**device, "meters": shown.get(device["id"])} for device in devices]
