"""The mode of the box: the mode last set by hand, the mode windows, the mode that applies now, and the power limit that
follows from it; and the energy of jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from appliance.controller.devices import cordons
from appliance.store import box, jobs, usage
from appliance.store.database import Database
from appliance.store.rows import WINDOWS, JobRow, WindowRow
from runtime.devices.kind import DeviceKind, Reading
from scheduler.core.workload import Device, Policy, PolicyKind
from scheduler.loop.mode_schedule import InForce, Window, in_force

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mode:
    """The division of devices, stored under box["mode"].

    serving_floor None means the box's default. by: who set the mode.
    """

    policy: PolicyKind
    train_devices: int | None = None
    since_s: float = 0.0
    serving_floor: int | None = None
    by: str = ""


def read_mode(db: Database) -> Mode:
    """Return the mode last set by hand; `auto` if no mode was ever set."""
    stored = box.get(db, "mode")
    return Mode("auto") if stored is None else Mode(**stored)


def write_mode(db: Database, mode: Mode) -> None:
    """Store a mode set by hand, which holds until a mode window next begins or ends."""
    box.put(db, "mode", asdict(mode))


def policy_of(mode: Mode | WindowRow, box_floor: int) -> Policy:
    """Return the planner's policy for a mode. box_floor: devices that serving keeps if the mode sets no number."""
    floor = box_floor if mode.serving_floor is None else mode.serving_floor
    return Policy(mode.policy, mode.train_devices, floor)


def floor_notes(policy: Policy, device_count: int) -> list[str]:
    """Return a note for users if the serving floor leaves training no device."""
    if policy.kind == "serve" or not 0 < device_count <= policy.serving_floor:
        return []
    return [f"The serving floor of {policy.serving_floor} keeps all {device_count} devices: training gets none."]


def mode_windows(db: Database, box_floor: int) -> tuple[Window, ...]:
    return tuple(window_of(row, box_floor) for row in WINDOWS.list_all(db))


@lru_cache(maxsize=256)
def window_of(row: WindowRow, box_floor: int) -> Window:
    """Convert a row to a window; raises InvalidSchedule. Cached: the scheduler calls it every round, and
    checking a cron expression costs as much as a round."""
    return Window(row.cron, policy_of(row, box_floor), row.tz, row.until, row.for_s, row.id)


def mode_in_force(db: Database, box_floor: int, now_s: float) -> InForce:
    mode = read_mode(db)
    return in_force(mode_windows(db, box_floor), policy_of(mode, box_floor), mode.since_s, now_s)


# --- power limit of the GPUs of the box's own machine, from [power] for the mode in force

POWER_EVERY_S = 15.0


class PowerKeeper:
    """Keeps the GPUs' power limit. limits_w: {mode: watts of each device}; empty: the box sets no limit. A mode without
    a limit uses the device's default. devices: returns the GPUs of the box's own machine."""

    def __init__(self, limits_w: Mapping[str, float], db: Database, devices: Collection[Device], kind: DeviceKind):
        self._db, self._devices, self._kind = db, devices, kind
        self._limits_w = {} if kind.on_host else limits_w
        self._limit_w: float | None = None
        self._refused: dict[str, str] = {}

    async def look(self) -> None:
        """Set the limits; called every `POWER_EVERY_S`, because a reset device has lost its limit."""
        if not self._limits_w:
            return
        self._limit_w = self._limits_w.get(mode_in_force(self._db, 0, time.time()).policy.kind)
        drained = cordons.drained(self._db)
        kept = {d.uuid: d.id for d in self._devices if d.uuid and drained.isdisjoint((d.id, d.uuid))}
        refusals = await asyncio.to_thread(self._kind.set_power_limits, kept, self._limit_w)
        refused = {kept[uuid]: why for uuid, why in refusals.items()}
        for device_id, why in refused.items() if refused != self._refused else ():
            log.error("its power limit cannot be set: %s", why, extra={"device": device_id})
        self._refused = refused

    def status(self) -> dict[str, Any]:
        """Return {"set": whether the box sets limits, "limit_w": None for the default, "refused": {device: why}}."""
        return {"set": bool(self._limits_w), "limit_w": self._limit_w, "refused": dict(self._refused)}


# --- energy of jobs, as counted by their devices; devices without a counter add nothing. Energy between two readings is
# charged to the holder at the second reading.

J_PER_KWH = 3.6e6
WHOLE = 0.9
"""Share of its time below which a job gets no energy per step or token."""


class EnergyMeter:
    """Charges energy to jobs. newest: returns the last reading of each device."""

    def __init__(self, db: Database, newest: Callable[[], Mapping[str, Reading]], status: Callable[[], dict[str, Any]]):
        self._db, self._newest, self._status = db, newest, status
        self._seen: dict[str, Reading] = {}

    async def look(self) -> None:
        """Charge the energy since the last call; called as often as devices are read."""
        readings = {name: newest for name, newest in self._newest().items() if newest.energy_j is not None}
        holders = {device["id"]: device["holder"] or {} for device in self._status()["devices"]} if readings else {}
        booked: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, now in readings.items():
            before, holder = self._seen.get(name), holders.get(name, {})
            if before is None or holder.get("kind") != "job":
                continue
            joules = (now.energy_j or 0.0) - (before.energy_j or 0.0)
            if joules >= 0 and now.at_s > before.at_s:  # a restarted driver or reader starts its counter again
                booked[holder["id"]][0] += joules
                booked[holder["id"]][1] += now.at_s - before.at_s
        self._seen = readings
        for job_id, (joules, metered_s) in booked.items():
            jobs.add_energy(self._db, job_id, joules, metered_s)


def of_job(db: Database, row: JobRow, now_s: float) -> dict[str, Any] | None:
    """Return a job's energy so far: "joules", "kwh", "metered_share" (share of its device time in which devices
    counted), "joules_per_step", "joules_per_1000_tokens". None: its devices have counted nothing."""
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
