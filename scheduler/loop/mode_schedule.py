"""Evaluates mode windows: modes that begin and end by the clock ("serve by day, train by night").

A window begins when its cron expression fires in its time zone, and puts its policy in force. It ends when its second
expression fires or after a duration; else it lasts until another window begins. An edge is the beginning or end of a
window. These rules also apply if the box was off during an edge:

- a mode set by hand after the latest edge is in force until the next edge;
- else the open window that began last is in force (if several began together, the last in the list);
- with no window open, the mode last set by hand is in force.

croniter computes local time with zoneinfo: a time that daylight saving skips fires when the clocks go forward; a time
that occurs twice fires at its first occurrence (at both if the hour is "*").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterBadDateError, croniter

from scheduler.core.errors import InvalidSchedule
from scheduler.core.workload import Policy

_MAX_S = 366 * 86400.0
_NAMES = re.compile("jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Window:
    """`cron`, `until`: five fields (minute hour day-of-month month day-of-week). `tz`: IANA name, e.g. "Europe/Berlin".

    `for_s`: length in seconds; at most one of `until` and `for_s`. `id`: name for users.
    """

    cron: str
    policy: Policy
    tz: str = "UTC"
    until: str | None = None
    for_s: float | None = None
    id: str = ""

    def __post_init__(self) -> None:
        try:
            ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            expected = 'expected an IANA name, e.g. "UTC", "Europe/Berlin" or "Asia/Shanghai"'
            raise InvalidSchedule(f"time zone {self.tz!r} is not known: {expected}", "tz") from None
        check_cron(self.cron, "cron")
        if self.until is not None:
            check_cron(self.until, "until")
            if self.for_s is not None:
                raise InvalidSchedule("a window ends either by `until` or after `for_s` seconds, not by both", "until")
        if self.for_s is not None and not 60.0 <= self.for_s <= _MAX_S:
            raise InvalidSchedule(f"a window lasts {self.for_s:g} s; expected from a minute to a year", "for_s")

    def last_s(self, now_s: float) -> float | None:
        """The window's latest beginning at or before now; None if it did not begin within the last year."""
        # get_prev is strictly before its start, but a firing at this very second counts.
        found_s = _fires_s(self.cron, self.tz, now_s + 1, "get_prev")
        return found_s if now_s - found_s < _MAX_S else None

    def next_s(self, now_s: float) -> float:
        """The window's first beginning after now."""
        return _fires_s(self.cron, self.tz, now_s, "get_next")

    def end_s(self, began_s: float) -> float | None:
        """When the window that began at `began_s` ends; None if it lasts until another window begins."""
        if self.for_s is not None:
            return began_s + self.for_s
        return None if self.until is None else _fires_s(self.until, self.tz, began_s, "get_next")


@dataclass(frozen=True, slots=True)
class InForce:
    """The policy in force, since when, until which edge (None without windows), and from which window (None: set by
    hand). `overridden`: the window that a mode set by hand since the latest edge overrides.
    """

    policy: Policy
    since_s: float
    until_s: float | None
    window: Window | None
    overridden: Window | None = None


def in_force(windows: Iterable[Window], set_by_hand: Policy, set_s: float, now_s: float) -> InForce:
    """Return the policy in force now. `set_by_hand`: policy that a user set at `set_s`."""
    edge_s, next_edges = float("-inf"), []
    began_s, holds = float("-inf"), None
    for window in windows:
        next_edges.append(window.next_s(now_s))
        last_s = window.last_s(now_s)
        if last_s is None:
            continue
        end_s = window.end_s(last_s)
        edge_s = max(edge_s, last_s)
        if end_s is not None and end_s <= now_s:
            edge_s = max(edge_s, end_s)
            continue
        if end_s is not None:
            next_edges.append(end_s)
        if last_s >= began_s:
            began_s, holds = last_s, window
    until_s = min(next_edges, default=None)
    if set_s > edge_s:
        return InForce(set_by_hand, set_s, until_s, None, holds)
    if holds is None:
        return InForce(set_by_hand, max(set_s, edge_s), until_s, None)
    return InForce(holds.policy, began_s if set_s <= began_s else edge_s, until_s, holds)


def check_cron(cron: str, param: str) -> None:
    """Raise InvalidSchedule unless this is a cron expression that fires at some date."""
    # croniter also accepts "R" (random at each evaluation) and "H"; a schedule must give the same result every time.
    plain = re.fullmatch(r"[\d*/,\-#lL ]+", _NAMES.sub("1", cron)) is not None
    if len(cron.split()) != 5 or not plain or not croniter.is_valid(cron):
        raise InvalidSchedule(
            f"schedule {cron!r} is not a cron expression: expected five fields, minute hour day month weekday, "
            'e.g. "0 22 * * *" for every day at 22:00',
            param,
        )
    try:
        croniter(cron, datetime(2026, 1, 1)).get_next(datetime)
    except CroniterBadDateError:
        raise InvalidSchedule(f"schedule {cron!r} never fires: it matches no date", param) from None


def _fires_s(cron: str, tz: str, from_s: float, way: Literal["get_next", "get_prev"]) -> float:
    """Return the nearest firing. In an hour that occurs twice, croniter fires both times, which is right for "every
    half hour" but wrong for "at half past two": then skip the second firing."""
    step = getattr(croniter(cron, datetime.fromtimestamp(int(from_s), ZoneInfo(tz))), way)
    firing: datetime = step(datetime)
    if not cron.split()[1].startswith("*"):
        while firing.fold and firing.utcoffset() != firing.replace(fold=0).utcoffset():
            firing = step(datetime)
    return firing.timestamp()
