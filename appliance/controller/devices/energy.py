"""Energy of jobs, as their devices count it: booked while they run, shown afterwards, estimated before.

A device that changed hands between two readings is booked by halves. Nothing is guessed where no counter is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.records import usage
from appliance.store.rows import JobRow
from runtime.devices.kind import Reading

J_PER_KWH = 3.6e6
WHOLE = 0.9
"""Nothing is told per step or token of a job that was metered for less of its time."""


class _Seen(NamedTuple):
    at_s: float
    joules: float
    job_id: str | None


class EnergyMeter:
    """newest: the last reading of each device."""

    def __init__(
        self, db: Database, newest: Callable[[], Mapping[str, Reading]], status: Callable[[], SchedulerStatus]
    ):
        self._db, self._newest, self._status = db, newest, status
        self._seen: dict[str, _Seen] = {}

    async def look(self) -> None:
        """Called as often as devices are read."""
        readings = {name: one for name, one in self._newest().items() if one.energy_j is not None}
        holders = {device["id"]: device["holder"] or {} for device in self._status()["devices"]} if readings else {}
        booked: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._seen = {name: seen for name, seen in self._seen.items() if name in readings}
        for name, reading in readings.items():
            assert reading.energy_j is not None
            before, holder = self._seen.get(name), holders.get(name, {})
            if before is not None and before.at_s >= reading.at_s:
                continue  # no newer reading since
            job_id = holder["id"] if holder.get("kind") == "job" else None
            now = self._seen[name] = _Seen(reading.at_s, reading.energy_j, job_id)
            if before is None or now.joules < before.joules:  # its driver, or who reads it, has begun again
                continue
            for one in (before.job_id, now.job_id):
                if one is not None:
                    booked[one][0] += (now.joules - before.joules) / 2
                    booked[one][1] += (now.at_s - before.at_s) / 2
        for job_id, (joules, metered_s) in booked.items():
            jobs.add_energy(self._db, job_id, joules, metered_s)


def of_job(db: Database, row: JobRow, now_s: float) -> dict[str, Any] | None:
    """What a job has drawn so far: "joules", "kwh", "metered_share" (of the time that it held devices in which
    they counted), "joules_per_step", "joules_per_1000_tokens". None: its devices count nothing, or have not yet."""
    if row.joules is None:
        return None
    held_s = usage.device_s(db, row.id, now_s)
    share = min(1.0, row.metered_s / held_s) if held_s else 1.0
    steps, tokens = (row.step, row.trained_tokens) if share >= WHOLE else (None, None)
    return {
        "joules": row.joules,
        "metered_share": share,
        "joules_per_step": row.joules / steps if steps else None,
        "joules_per_1000_tokens": 1000 * row.joules / tokens if tokens else None,
        "kwh": row.joules / J_PER_KWH,
    }
