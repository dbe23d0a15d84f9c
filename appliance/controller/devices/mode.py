"""Stores the mode of the box: the one set by hand last, the mode windows, and which one applies now."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from appliance.store.database import Database
from appliance.store.records import box, windows
from appliance.store.rows import WindowRow
from scheduler.core.workload import Policy, PolicyKind
from scheduler.loop.mode_schedule import InForce, Window, in_force


@dataclass(frozen=True, slots=True)
class Mode:
    """How devices are divided; stored under box["mode"].

    serving_floor None: the box's default. by: who set it.
    """

    policy: PolicyKind
    train_devices: int | None = None
    since_s: float = 0.0
    serving_floor: int | None = None
    by: str = ""


def read_mode(db: Database) -> Mode:
    """The mode set by hand last; `auto` if none was ever set."""
    stored = box.get(db, "mode")
    return Mode("auto") if stored is None else Mode(**stored)


def write_mode(db: Database, wanted: Mode, now_s: float | None = None) -> Mode:
    """`since_s` moves only on a change: setting the current mode again is not a change.

    While a window applies it is a change: the mode set by hand then holds until the next edge.
    """
    now_s = time.time() if now_s is None else now_s
    before, mode = read_mode(db), replace(wanted, since_s=now_s)
    same = box.get(db, "mode") is not None and mode == replace(before, since_s=now_s, by=wanted.by)
    if same and mode_in_force(db, 0, now_s).window is None:
        return before
    box.put(db, "mode", asdict(mode))
    return mode


def policy_of(mode: Mode, box_floor: int) -> Policy:
    """box_floor: devices that serving keeps if the mode sets no number."""
    floor = box_floor if mode.serving_floor is None else mode.serving_floor
    return Policy(mode.policy, mode.train_devices, floor)


def floor_notes(policy: Policy, device_count: int) -> list[str]:
    """Notes for users about a floor that leaves training nothing. A floor above the number of present devices is no
    error if it was set earlier: the box keeps what it has, and more once a node has joined."""
    if policy.kind == "serve" or not device_count or policy.serving_floor < device_count:
        return []
    have = "all" if policy.serving_floor == device_count else "all there are,"
    return [f"The serving floor of {policy.serving_floor} keeps {have} {device_count} devices: training gets none."]


def mode_windows(db: Database, box_floor: int) -> tuple[Window, ...]:
    return tuple(window_of(row, box_floor) for row in windows.list_all(db))


@lru_cache(maxsize=256)
def window_of(row: WindowRow, box_floor: int) -> Window:
    """Raises InvalidSchedule for invalid windows. Cached: the scheduler calls it every round, and
    checking a cron expression costs as much as a round."""
    floor = box_floor if row.serving_floor is None else row.serving_floor
    policy = Policy(row.policy, row.train_devices, floor)
    return Window(row.cron, policy, row.tz, row.until, row.for_s, row.id)


def mode_in_force(db: Database, box_floor: int, now_s: float) -> InForce:
    mode = read_mode(db)
    return in_force(mode_windows(db, box_floor), policy_of(mode, box_floor), mode.since_s, now_s)
