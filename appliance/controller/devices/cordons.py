"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted; lost
nodes, whose devices users see until the nodes return or an admin forgets them (the scheduler never does); and the watch
that cordons devices which fail.

A cordon is stored by the device's UUID, where it has one, else by its id "<node>/<index>": when a GPU drops off the
bus, the driver numbers those behind it again. A device is a row of `Scheduler.status`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from appliance.store.database import Database
from appliance.store.records import audit, box
from appliance.store.rows import AuditRow, columns
from runtime.devices.kind import Reading
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import CORDONED as LOOP_SAYS
from scheduler.core.workload import Device, NodeChange, node_of
from scheduler.devices.health import failing

log = logging.getLogger(__name__)

CORDONS, NODES = "device_cordons", "joined_nodes"


class Cordon(TypedDict):
    """drain: {"reason", "by", "since_s"} by a person. fault: why the box cordoned the device; "" if it did not.
    retry_s: when the box tries it again; None: it waits for a person."""

    drain: dict[str, Any] | None
    fault: str
    retry_s: float | None


NONE = Cordon(drain=None, fault="", retry_s=None)


def read(db: Database) -> dict[str, Cordon]:
    rows: dict[str, Cordon] = box.get(db, CORDONS, {})
    return rows


def write(db: Database, rows: Mapping[str, Cordon]) -> None:
    box.put(db, CORDONS, rows)


def faulty(rows: Mapping[str, Cordon]) -> set[str]:
    """Those that the box cordoned."""
    return {name for name, row in rows.items() if row["fault"]}


def drained(db: Database) -> frozenset[str]:
    """Those that a person drained."""
    return frozenset(name for name, row in read(db).items() if row["drain"])


def _names(device: Mapping[str, Any]) -> list[str]:
    """Names that a device's cordon may have, the one for a new cordon first."""
    return [name for name in (device.get("uuid"), device["id"]) if name]


def _of(rows: Mapping[str, Cordon], device: Mapping[str, Any]) -> Cordon | None:
    return next((rows[name] for name in _names(device) if name in rows), None)


def drain(db: Database, device: Mapping[str, Any], reason: str, by: str, now_s: float) -> bool:
    """Ask the device's holder to leave. False if it was cordoned already; a new reason replaces the old one."""
    with db.transaction():
        rows = read(db)
        row = _of(rows, device)
        since_s = row["drain"]["since_s"] if row and row["drain"] else now_s
        drain = {"reason": reason, "by": by, "since_s": since_s}
        write(db, {**rows, _names(device)[0]: {**(row or NONE), "drain": drain}})
        return row is None


def undrain(db: Database, device: Mapping[str, Any]) -> None:
    """Return the device to use; a person or the box cordoned it."""
    with db.transaction():
        write(db, {name: row for name, row in read(db).items() if name not in _names(device)})


def shown(rows: Mapping[str, Cordon], device: dict[str, Any]) -> dict[str, Any]:
    """A device with its health from the store, `drain` (None without one), and `cordon`: what keeps it out of
    use, "person" or "box"; None for what is not said here (its node leaves)."""
    row = _of(rows, device)
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

_SHOWN = ("id", "node", "index", "kind", "name", "memory_bytes", "uuid")
_METERS = (
    "temperature_c slowdown_c power_w power_limit_w energy_j busy memory_used_bytes clock_hz throttled "
    "ecc_uncorrected at_s"
)


def joined(db: Database, node: str, devices: Sequence[dict[str, Any]]) -> bool:
    """The node is present. False when that was known: a new controller meets the nodes of its predecessor."""
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
        for device in row["devices"]:
            undrain(db, device)
        left(db, node)
        return ids


def in_view(db: Database, there: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All devices shown to users: present ones with their cordons, then those of lost nodes.

    `lost`: {"reason", "since_s"} or None; `health` is "lost" where it is not None.
    """
    away = {name: row for name, row in box.get(db, NODES, {}).items() if row["lost"] is not None}
    rows = read(db)
    devices = [{**shown(rows, device), "lost": None} for device in there if device["node"] not in away]
    for _, node in sorted(away.items()):
        since = {"health": "lost", "health_reason": node["lost"]["reason"], "holder": None, "lost": node["lost"]}
        for device in node["devices"]:
            drain = (_of(rows, device) or NONE)["drain"]
            devices.append({**device, **since, "drain": drain, "cordon": None})
    return devices


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Each device with `meters`, by the names of `runtime.devices.kind.Reading`; None of one that tells nothing."""
    meters = {name: columns(reading, _METERS) for name, reading in readings.items()}
    return [{**device, "meters": meters.get(device["id"])} for device in devices]


# --- the watch


class DeviceWatch:
    """Reads the drivers' health data, and cordons devices that fail, as `appliance gpu drain` would. `appliance gpu
    undrain` lifts a cordon and clears the device's failures; so does the watch after a while, if the cause may have
    passed and no person drained the device. Every cordon, and every node that joins or leaves, is a row of the audit
    log under the box's own name.

    nudge: called after a device was cordoned."""

    def __init__(
        self, db: Database, config: SchedulerConfig, nudge: Callable[[], Any], clock: Callable[[], float] = time.time
    ):
        self._db, self._config, self._nudge, self._clock = db, config, nudge, clock
        self._readings: dict[str, deque[Reading]] = {}
        self._kept_s = 2 * max(config.hot_for_s, config.slow_for_s)
        self._uuids: dict[str, str] = {}  # by device id, of present devices
        self._ours = faulty(read(db))

    async def look(self, read_devices: Callable[[Collection[str]], Awaitable[tuple[Reading, ...]]]) -> None:
        """Read and judge; called every `device_check_s`. read_devices: one reading per GPU of all nodes, except of
        those to release, given by id: what a person drained, so that it can be reset."""
        ids = {uuid: device_id for device_id, uuid in self._uuids.items()}
        released = {ids.get(name, name) for name in drained(self._db)}
        for device_id in released:
            self._readings.pop(device_id, None)
        for reading in await read_devices(released):
            kept = self._readings.setdefault(reading.device_id, deque())
            kept.append(reading)
            while len(kept) > 2 and reading.at_s - kept[1].at_s > self._kept_s:
                del kept[1]  # never the first: it has the errors from before the watch began
        self.judge()

    def newest(self) -> dict[str, Reading]:
        """The last reading of each device that is read and answers, by id."""
        return {
            name: kept[-1] for name, kept in self._readings.items() if kept and not (kept[-1].lost or kept[-1].unfit)
        }

    def node_changed(self, node: str, what: NodeChange, devices: tuple[Device, ...]) -> None:
        """A node with these devices joined or left."""
        if what == "joined":
            if joined(self._db, node, [asdict(device) for device in devices]):
                self._record("node.joined", node)
            self.check(devices)
            return
        for device_id in [name for name in self._readings if name.startswith(f"{node}/")]:
            del self._readings[device_id]
        if what == "left":
            left(self._db, node)
            self._record("node.left", node)
        else:
            self._lost(node, "its node does not answer any more")

    def began(self, present: Collection[str]) -> None:
        """Mark expected nodes as lost that were not among these when the controller started."""
        for node in missed(self._db, present):
            self._lost(node, "its node was not there when the box's controller began")

    def _lost(self, node: str, reason: str) -> None:
        lost(self._db, node, reason, self._clock())
        self._record("node.lost", node, reason)

    def check(self, devices: Collection[Device]) -> None:
        """Note which devices are present, and cordon those that cannot be used before anything is placed on them."""
        nodes = {device.node for device in devices}
        others = {name: uuid for name, uuid in self._uuids.items() if node_of(name) not in nodes}
        self._uuids = others | {device.id: device.uuid for device in devices if device.uuid}
        for device in devices:
            if device.unfit:
                reading = Reading(device.id, self._clock(), unfit=device.unfit)
                self._readings.setdefault(device.id, deque()).append(reading)
        self.judge()

    def judge(self) -> None:
        """Cordon devices that fail now, lift expired cordons, clear failures of devices that a person put back into
        use."""
        now_s, ids = self._clock(), {uuid: device_id for device_id, uuid in self._uuids.items()}
        with self._db.transaction():
            before = read(self._db)
            for name in self._ours - faulty(before):
                self._readings.pop(ids.get(name, name), None)
            readings = {device_id: tuple(kept) for device_id, kept in self._readings.items()}
            rows, lifted = dict(before), list[str]()
            faults = failing(readings, self._config)
            for device_id, fault in faults.items():
                if not rows.keys() & {device_id, name := self._uuids.get(device_id, device_id)}:
                    retry_s = now_s + self._config.device_retry_s if fault.may_pass else None
                    rows[name] = Cordon(drain=None, fault=fault.reason, retry_s=retry_s)
                    self._record("device.cordon", device_id, fault.reason)
            for name, row in before.items():
                device_id = ids.get(name, name)
                due = row["retry_s"] is not None and now_s >= row["retry_s"] and not row["drain"]
                if due and device_id not in faults and "/" in device_id:  # one that is absent is known by its UUID only
                    self._record("device.try_again", device_id, f"it was cordoned: {row['fault']}")
                    del rows[name]
                    lifted.append(device_id)
            if rows != before:
                write(self._db, rows)
        # Memory changes only after the write: with a full disk the next check finds everything again.
        self._ours = faulty(rows)
        for device_id in lifted:
            self._readings.pop(device_id, None)
        if self._ours != faulty(before):
            self._nudge()

    def _record(self, action: str, target: str, reason: str = "") -> None:
        level = logging.INFO if action in ("node.joined", "node.left", "device.try_again") else logging.ERROR
        log.log(level, "%s %s", action, reason, extra={"device": target})
        detail = {"reason": reason} if reason else {}
        audit.insert(self._db, AuditRow(action, target, detail=detail, created_s=self._clock()))
