"""Counts the energy that devices draw for whoever holds them: a job, a model's engines, or nobody.

The counters are the devices' own; here their differences between two looks are booked. A device that changed hands in
between is booked by halves. What no counter tells is not guessed: such time is in no row.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from appliance.store.records import energy
from appliance.store.records.energy import Kind
from runtime.devices.kind import Reading

Holder = tuple[Kind, str]
NOBODY: Holder = ("idle", "")


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    joules: float
    holder: Holder


class EnergyMeter:
    """newest: the last reading of each device."""

    def __init__(
        self,
        db: Database,
        newest: Callable[[], Mapping[str, Reading]],
        status: Callable[[], SchedulerStatus],
        clock: Callable[[], float] = time.time,
    ):
        self._db, self._newest, self._status, self._clock = db, newest, status, clock
        self._seen: dict[str, _Seen] = {}

    async def look(self) -> None:
        """Called as often as devices are read."""
        readings = {name: one for name, one in self._newest().items() if one.energy_j is not None}
        holders = holders_of(self._status()) if readings else {}
        booked: dict[Holder, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for device_id, reading in readings.items():
            assert reading.energy_j is not None
            before = self._seen.get(device_id)
            if before is not None and before.at_s >= reading.at_s:
                continue  # no newer reading since
            now = _Seen(reading.at_s, reading.energy_j, holders.get(device_id, NOBODY))
            self._seen[device_id] = now
            if before is None or now.joules < before.joules:  # its driver, or who reads it, has begun again
                continue
            for holder in (before.holder, now.holder):
                booked[holder][0] += (now.joules - before.joules) / 2
                booked[holder][1] += (now.at_s - before.at_s) / 2
        for gone in self._seen.keys() - readings.keys():
            del self._seen[gone]
        if booked:
            energy.add(self._db, {holder: (joules, s) for holder, (joules, s) in booked.items()}, self._clock())


def holders_of(status: SchedulerStatus) -> dict[str, Holder]:
    """Who holds what, by device."""
    models = {replica["id"]: replica["model"] for replica in status["replicas"]}
    found: dict[str, Holder] = {}
    for device in status["devices"]:
        holder = device["holder"]
        if holder is not None and holder["kind"] == "job":
            found[device["id"]] = ("job", holder["id"])
        elif holder is not None and holder["id"] in models:
            found[device["id"]] = ("model", models[holder["id"]])
    return found
