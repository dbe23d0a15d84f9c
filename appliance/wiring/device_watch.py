"""Watches the devices: reads what their drivers tell, hears of what dies on them, and cordons one that fails.

A cordon is the same that `appliance gpu drain` sets: it is in the store, so it survives restarts, and holders leave the
device as they would for an operator. `appliance gpu undrain` lifts it, and what was held against the device with it.
Every cordon, and every node that comes or goes, is a row of the audit log, in the name of the box itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from appliance.controller.cordons import CORDONED, FAILING
from appliance.store import audit, box
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.rows import AuditRow
from scheduler.config import SchedulerConfig
from scheduler.device_health import Death, Reading, failing

log = logging.getLogger(__name__)

KEPT_READINGS = 120


class DeviceWatch:
    """`read`: one reading per GPU of all nodes. `on_change` is called after a device was cordoned."""

    def __init__(
        self,
        db: Database,
        read: Callable[[], Awaitable[tuple[Reading, ...]]],
        config: SchedulerConfig,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ):
        self._db, self._read, self._config, self._on_change, self._clock = db, read, config, on_change, clock
        self._readings: dict[str, deque[Reading]] = {}
        self._deaths: deque[Death] = deque(maxlen=1000)
        self._ours: set[str] = set(box.get(db, FAILING, {}))

    async def run(self) -> None:
        """Reads and judges every `device_check_s`, for as long as it runs."""
        while True:
            for reading in await self._read():
                kept = self._readings.setdefault(reading.device_id, deque())
                kept.append(reading)
                if len(kept) > KEPT_READINGS:
                    del kept[1]  # never the first: it says which errors were there before the watch began
            self.judge()
            await asyncio.sleep(self._config.device_check_s)

    def died(self, device_ids: tuple[str, ...], holder: str, reason: str) -> None:
        """A rank or engine of this job or model ended on these devices without being asked to."""
        now_s = self._clock()
        self._deaths.extend(Death(device_id, holder, now_s, reason) for device_id in device_ids)
        self.judge()

    def node_changed(self, node: str, what: str) -> None:
        """`what`: "joined", "left" (in order) or "lost"."""
        self._tell(f"node.{what}", node, {})

    def judge(self) -> None:
        """Cordon what fails now; forget what was held against a device whose cordon somebody lifted."""
        cordoned = set(box.get(self._db, CORDONED, []))
        for device_id in self._ours - cordoned:
            self._readings.pop(device_id, None)
            self._deaths = deque((d for d in self._deaths if d.device_id != device_id), maxlen=self._deaths.maxlen)
        self._ours &= cordoned
        readings = {device_id: tuple(kept) for device_id, kept in self._readings.items()}
        found = failing(readings, self._deaths, self._clock(), self._config)
        fresh = {device_id: reason for device_id, reason in found.items() if device_id not in cordoned}
        if not fresh and set(box.get(self._db, FAILING, {})) == self._ours:
            return
        self._ours |= set(fresh)
        with self._db.transaction():
            reasons = {**box.get(self._db, FAILING, {}), **fresh}
            box.put(self._db, CORDONED, sorted(cordoned | set(fresh)))
            box.put(self._db, FAILING, {device_id: reasons[device_id] for device_id in sorted(self._ours)})
            for device_id, reason in fresh.items():
                self._tell("device.cordon", device_id, {"reason": reason})
        if fresh:
            self._on_change()

    def _tell(self, action: str, target: str, detail: dict[str, str]) -> None:
        level = logging.INFO if action in ("node.joined", "node.left") else logging.ERROR
        log.log(level, "%s %s", action, detail.get("reason", ""), extra={"device": target})
        audit.insert(self._db, AuditRow(new_id("audit_"), None, action, target, "done", "", self._clock(), detail))
