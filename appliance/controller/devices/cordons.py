"""Cordons: devices that their holders must leave and that get no new holders, kept in the store until lifted. Lost
nodes: users see their devices until a node returns or an admin forgets it; the scheduler never sees them. The watch
cordons failing devices.

A device is a row of `Scheduler.status`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from appliance.store import jobs
from appliance.store.database import Database
from appliance.store.rows import AUDIT, CORDONS, NODES, AuditRow, CordonRow, NodeRow, columns
from runtime.devices.kind import Reading
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Device, NodeChange, node_of
from scheduler.devices.health import Fault, failing, straggling

log = logging.getLogger(__name__)


def read(db: Database) -> dict[str, CordonRow]:
    return {row.name: row for row in CORDONS.list_all(db)}


def faulty(db: Database) -> set[str]:
    """Return the names of devices that the box cordoned."""
    return {row.name for row in CORDONS.list_all(db, "fault != ''")}


def drained(db: Database) -> set[str]:
    """Return the names of devices that a person drained."""
    return {row.name for row in CORDONS.list_all(db, "drain IS NOT NULL")}


def _names(device: Mapping[str, Any]) -> list[str]:
    """Return the possible names of a device's cordon; a new cordon gets the first name."""
    return [name for name in (device.get("uuid"), device["id"]) if name]


def _of(rows: Mapping[str, CordonRow], device: Mapping[str, Any]) -> CordonRow | None:
    """Return the device's cordon, None if it has none."""
    return next((rows[name] for name in _names(device) if name in rows), None)


def drain(db: Database, device: Mapping[str, Any], reason: str, by: str, now_s: float) -> bool:
    """Cordon a device, so that its holder leaves. False if it was cordoned before; the new reason replaces the old
    one."""
    with db.transaction():
        row = _of(read(db), device)
        since_s = row.drain["since_s"] if row and row.drain else now_s
        drain = {"reason": reason, "by": by, "since_s": since_s}
        CORDONS.put(db, replace(row or CordonRow(_names(device)[0]), drain=drain))
        return row is None


def undrain(db: Database, device: Mapping[str, Any]) -> None:
    """Lift a device's cordon, whether a person or the box set it."""
    with db.transaction():
        for name in _names(device):
            CORDONS.delete(db, name)


def shown(rows: Mapping[str, CordonRow], device: dict[str, Any]) -> dict[str, Any]:
    """Return a device with its health from the store, `drain` (None if not drained), and `cordon`: who cordoned it,
    "person" or "box"; None if nobody did, even if the device is out of use because its node leaves."""
    row = _of(rows, device)
    if row is None:
        return {**device, "drain": None, "cordon": None}
    by_person, why = row.drain, row.fault
    if by_person:
        why = f"drained by {by_person['by']}" + (f": {by_person['reason']}" if by_person["reason"] else "")
    elif row.retry_s is not None:
        why += f"; it is tried again in {max(0.0, row.retry_s - time.time()):.0f} s"
    return {
        **device,
        "health": "draining" if device["health"] == "ok" else device["health"],
        "health_reason": why,
        "drain": by_person,
        "cordon": "person" if by_person else "box",
    }


# --- nodes

_SHOWN = "id node index kind name memory_bytes uuid"
_METERS = (
    "temperature_c slowdown_c power_w power_limit_w energy_j busy memory_used_bytes clock_hz throttled "
    "ecc_uncorrected at_s"
)


def forget(db: Database, node: str) -> list[str] | None:
    """Hide a lost node's devices and delete their cordons. Returns the devices' ids; None if the node is not lost."""
    with db.transaction():
        row = NODES.find(db, node)
        if row is None or row.lost is None:
            return None
        for device in row.devices:
            undrain(db, device)
        NODES.delete(db, node)
        return [device["id"] for device in row.devices]


def in_view(db: Database, present: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all devices for users: present devices with their cordons, then devices of lost nodes.

    `lost`: {"reason", "since_s"} or None; `health` is "lost" where it is not None.
    """
    cordons, lost_nodes = read(db), {node.id: node for node in NODES.list_all(db, "lost IS NOT NULL")}
    devices = [{**shown(cordons, device), "lost": None} for device in present if device["node"] not in lost_nodes]
    for node in lost_nodes.values():
        lost = node.lost or {}
        state = {"health": "lost", "health_reason": lost["reason"], "holder": None, "lost": lost, "cordon": None}
        for device in node.devices:
            cordon = _of(cordons, device)
            devices.append({**device, **state, "drain": cordon.drain if cordon else None})
    return devices


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Add `meters` to each device: fields of `runtime.devices.kind.Reading`; None without a reading."""
    meters = {name: columns(reading, _METERS) for name, reading in readings.items()}
    return [{**device, "meters": meters.get(device["id"])} for device in devices]


# --- the watch


class DeviceWatch:
    """Reads the drivers' health data, and cordons devices that fail. `appliance gpu undrain` lifts a cordon and clears
    the device's failures. After a while so does the watch, if the cause may have passed and no person drained the
    device. Every cordon, and every node that joins or leaves, is in the audit log. nudge: called after a device was
    cordoned."""

    def __init__(
        self, db: Database, config: SchedulerConfig, nudge: Callable[[], Any], clock: Callable[[], float] = time.time
    ):
        self._db, self._config, self._nudge, self._clock = db, config, nudge, clock
        self._readings: dict[str, deque[Reading]] = {}
        self._kept_s = 2 * max(config.hot_for_s, config.slow_for_s)
        self._uuids: dict[str, str] = {}  # {device id: …} of present devices
        self._ours = faulty(db)
        self._held: dict[str, tuple[list[str], float]] = {}  # {running job: (its devices, since when)}

    async def look(self, read_devices: Callable[[Collection[str]], Awaitable[tuple[Reading, ...]]]) -> None:
        """Read and judge devices; called every `device_check_s`. read_devices: takes the ids of drained devices, which
        it releases so that they can be reset, and returns a reading of each other GPU of all nodes."""
        ids = {uuid: device_id for device_id, uuid in self._uuids.items()}
        released = {ids.get(name, name) for name in drained(self._db)}
        for device_id in released:
            self._readings.pop(device_id, None)
        for reading in await read_devices(released):
            kept = self._readings.setdefault(reading.device_id, deque())
            kept.append(reading)
            while len(kept) > 2 and reading.at_s - kept[1].at_s > self._kept_s:
                del kept[1]  # keep the first reading: its error counts are from before the watch
        self.judge()

    def newest(self) -> dict[str, Reading]:
        """Return {device id: last reading} of the devices that answer."""
        return {
            name: kept[-1] for name, kept in self._readings.items() if kept and not (kept[-1].lost or kept[-1].unfit)
        }

    def node_changed(self, node: str, change: NodeChange, devices: tuple[Device, ...]) -> None:
        """A node with these devices joined or left."""
        if change == "joined":
            known = NODES.find(self._db, node)
            NODES.put(self._db, NodeRow(node, [columns(device, _SHOWN) for device in devices]))
            if known is None or known.lost is not None:  # not recorded for nodes that an earlier controller knew
                self._record("node.joined", node)
            self.check(devices)
            return
        for device_id in [name for name in self._readings if name.startswith(f"{node}/")]:
            del self._readings[device_id]
        if change == "left":  # the node left in order and is not expected back
            NODES.delete(self._db, node)
            self._record("node.left", node)
        else:
            self._lost(node, "its node does not answer any more")

    def began(self, present: Collection[str]) -> None:
        """Mark expected nodes as lost that are not among `present`, the nodes at the controller's start."""
        for node in NODES.list_all(self._db, "lost IS NULL"):
            if node.id not in present:
                self._lost(node.id, "its node was not there when the box's controller began")

    def _lost(self, node: str, reason: str) -> None:
        if NODES.find(self._db, node) is not None:
            NODES.update(self._db, node, lost={"since_s": self._clock(), "reason": reason})
        self._record("node.lost", node, reason)

    def check(self, devices: Collection[Device]) -> None:
        """Record the present devices, and cordon unusable ones before anything is placed on them."""
        nodes = {device.node for device in devices}
        others = {name: uuid for name, uuid in self._uuids.items() if node_of(name) not in nodes}
        self._uuids = others | {device.id: device.uuid for device in devices if device.uuid}
        for device in devices:
            if device.unfit:
                reading = Reading(device.id, self._clock(), unfit=device.unfit)
                self._readings.setdefault(device.id, deque()).append(reading)
        self.judge()

    def judge(self) -> None:
        """Cordon failing devices, lift expired cordons, clear failures of devices that a person put back into use."""
        now_s, ids = self._clock(), {uuid: device_id for device_id, uuid in self._uuids.items()}
        with self._db.transaction():
            before = read(self._db)
            ours = {name for name, row in before.items() if row.fault}
            for name in self._ours - ours:
                self._readings.pop(ids.get(name, name), None)
            faults, lifted = failing({name: tuple(kept) for name, kept in self._readings.items()}, self._config), []
            faults = self._straggling(now_s) | faults
            for device_id, fault in faults.items():
                name = self._uuids.get(device_id, device_id)
                if not before.keys() & {device_id, name}:
                    retry_s = now_s + self._config.device_retry_s if fault.may_pass else None
                    CORDONS.insert(self._db, CordonRow(name, fault=fault.reason, retry_s=retry_s))
                    self._record("device.cordon", device_id, fault.reason)
            for name, row in before.items():
                device_id = ids.get(name, name)
                due = row.retry_s is not None and now_s >= row.retry_s and not row.drain
                if due and device_id not in faults and "/" in device_id:  # an absent device is known only by its UUID
                    self._record("device.try_again", device_id, f"it was cordoned: {row.fault}")
                    CORDONS.delete(self._db, name)
                    lifted.append(device_id)
            faulty_now = faulty(self._db)
        # Attributes change only after the write, so that the next check repeats all if the disk is full.
        self._ours = faulty_now
        for device_id in lifted:
            self._readings.pop(device_id, None)
        if faulty_now != ours:
            self._nudge()

    def _straggling(self, now_s: float) -> dict[str, Fault]:
        """Return {device id: fault} of slow GPUs among those that a job has held for `slow_for_s`."""
        before, self._held, faults = self._held, {}, dict[str, Fault]()
        for job in jobs.list_unfinished(self._db, " AND phase = 'running'"):
            if len(job.devices) < 2:
                continue
            devices, since_s = before.get(job.id, ([], 0.0))
            self._held[job.id] = (job.devices, since_s if devices == job.devices else now_s)
            since_s = self._held[job.id][1]
            if now_s - since_s >= self._config.slow_for_s and self._readings.keys() >= set(job.devices):
                rows = [row for row in jobs.last_metrics(self._db, job.id, 1000) if row.created_s > since_s]
                recent = [row for row in rows if now_s - row.created_s <= self._config.slow_for_s]
                steps = (row.rank_seconds for row in (recent if len(recent) >= 20 else rows[-20:]))
                faults |= straggling([step for step in steps if step and len(step) == len(job.devices)], job.devices)
        return faults

    def _record(self, action: str, target: str, reason: str = "") -> None:
        level = logging.INFO if action in ("node.joined", "node.left", "device.try_again") else logging.ERROR
        log.log(level, "%s %s", action, reason, extra={"device": target})
        detail = {"reason": reason} if reason else {}
        AUDIT.insert(self._db, AuditRow(action, target, detail=detail, created_s=self._clock()))
