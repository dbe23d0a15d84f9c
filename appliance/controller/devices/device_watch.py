"""Watches the devices: reads their drivers' health data, counts deaths on them, and cordons devices that fail.

A cordon is the same as the one set by `appliance gpu drain`: it is in the store, survives restarts, and makes holders
leave the device. `appliance gpu undrain` lifts it and clears the device's failures; the watch itself does the same
after a while, if the cause may have passed and no person drained the device.
Every cordon, and every node that joins or leaves, is a row of the audit log under the box's own name.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict
from typing import Any

from appliance.controller.devices import cordons
from appliance.store.database import Database
from appliance.store.records import audit
from appliance.store.rows import AuditRow
from runtime.devices.kind import Reading
from scheduler.core.config import SchedulerConfig
from scheduler.core.inventory import Device, NodeChange
from scheduler.devices.health import Death, failing

log = logging.getLogger(__name__)

KEPT_READINGS = 120


class DeviceWatch:
    """nudge: called after a device was cordoned."""

    def __init__(
        self, db: Database, config: SchedulerConfig, nudge: Callable[[], Any], clock: Callable[[], float] = time.time
    ):
        self._db, self._config, self._nudge, self._clock = db, config, nudge, clock
        self._readings: dict[str, deque[Reading]] = {}
        self._deaths: deque[Death] = deque(maxlen=1000)
        self._uuids: dict[str, str] = {}  # by device id, of present devices
        self._ours = cordons.faulty(cordons.read(db))

    async def look(self, read: Callable[[Collection[str]], Awaitable[tuple[Reading, ...]]]) -> None:
        """Read and judge; called every `device_check_s`. read: one reading per GPU of all nodes, except of those to
        release, given by id. What a person drained is released, so that it can be reset, and judged again once it is
        put back into use."""
        ids = {uuid: device_id for device_id, uuid in self._uuids.items()}
        drained = {ids.get(name, name) for name in cordons.drained(self._db)}
        for device_id in drained:
            self._readings.pop(device_id, None)
        for reading in await read(drained):
            kept = self._readings.setdefault(reading.device_id, deque())
            kept.append(reading)
            if len(kept) > KEPT_READINGS:
                del kept[1]  # never the first: it has the errors from before the watch began
        self.judge()

    def newest(self) -> dict[str, Reading]:
        """The last reading of each device that is read and answers, by id."""
        return {
            name: kept[-1] for name, kept in self._readings.items() if kept and not (kept[-1].lost or kept[-1].unfit)
        }

    def died(self, device_ids: tuple[str, ...], holder: str, reason: str) -> None:
        """Count a rank or engine of this job or model that died on these devices without being stopped."""
        now_s = self._clock()
        self._deaths.extend(Death(device_id, holder, now_s, reason) for device_id in device_ids)
        try:
            self.judge()
        except sqlite3.Error as error:  # the caller has more to do than to count a death against a device
            log.exception("a device cannot be cordoned now (%s); the next check tries again", error)

    def node_changed(self, node: str, what: NodeChange, devices: tuple[Device, ...]) -> None:
        """A node with these devices joined or left."""
        if what == "joined":
            if cordons.joined(self._db, node, [asdict(device) for device in devices]):
                self._record("node.joined", node)
            self.check(devices)
            return
        for device_id in [name for name in self._readings if name.startswith(f"{node}/")]:
            del self._readings[device_id]
        if what == "left":
            cordons.left(self._db, node)
            self._record("node.left", node)
        else:
            self._lost(node, "its node does not answer any more")

    def began(self, present: Collection[str]) -> None:
        """Mark expected nodes as lost that were not among these when the controller started."""
        for node in cordons.missed(self._db, present):
            self._lost(node, "its node was not there when the box's controller began")

    def _lost(self, node: str, reason: str) -> None:
        cordons.lost(self._db, node, reason, self._clock())
        self._record("node.lost", node, reason)

    def check(self, devices: Collection[Device]) -> None:
        """Note which devices are present, and cordon those that cannot be used before anything is placed on them."""
        nodes = {device.node for device in devices}
        others = {name: uuid for name, uuid in self._uuids.items() if name.rpartition("/")[0] not in nodes}
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
            before = cordons.read(self._db)
            for name in self._ours - cordons.faulty(before):
                self._forget(ids.get(name, name))
            readings = {device_id: tuple(kept) for device_id, kept in self._readings.items()}
            rows, lifted = dict(before), list[str]()
            faults = failing(readings, self._deaths, now_s, self._config)
            for device_id, fault in faults.items():
                if not rows.keys() & {device_id, name := self._uuids.get(device_id, device_id)}:
                    retry_s = now_s + self._config.device_retry_s if fault.may_pass else None
                    rows[name] = cordons.Cordon(drain=None, fault=fault.reason, retry_s=retry_s)
                    self._record("device.cordon", device_id, fault.reason)
            for name, row in before.items():
                device_id = ids.get(name, name)
                due = row["retry_s"] is not None and now_s >= row["retry_s"] and not row["drain"]
                if due and device_id not in faults and "/" in device_id:  # one that is absent is known by its UUID only
                    self._record("device.try_again", device_id, f"it was cordoned: {row['fault']}")
                    del rows[name]
                    lifted.append(device_id)
            if rows != before:
                cordons.write(self._db, rows)
        # Memory changes only after the write: with a full disk the next check finds everything again.
        self._ours = cordons.faulty(rows)
        for device_id in lifted:
            self._forget(device_id)
        if self._ours != cordons.faulty(before):
            self._nudge()

    def _forget(self, device_id: str) -> None:
        self._readings.pop(device_id, None)
        self._deaths = deque((d for d in self._deaths if d.device_id != device_id), maxlen=self._deaths.maxlen)

    def _record(self, action: str, target: str, reason: str = "") -> None:
        level = logging.INFO if action in ("node.joined", "node.left", "device.try_again") else logging.ERROR
        log.log(level, "%s %s", action, reason, extra={"device": target})
        detail = {"reason": reason} if reason else {}
        audit.insert(self._db, AuditRow(action, target, detail=detail, created_s=self._clock()))
