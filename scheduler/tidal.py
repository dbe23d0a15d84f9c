"""Tidal windows: modes that come and go by the clock ("serve by day, train by night").

A window is a cron expression in a time zone and the policy that holds from each of its firings on. What holds now is
what was set last: by the latest firing of any window, or by a person. So a person's `mode set` lasts until the next
firing, and a box that was off over a firing wakes up in the right mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import croniter

from scheduler.errors import InvalidSchedule
from scheduler.workload import Policy

_LOOK_BACK_DAYS = 366


@dataclass(frozen=True, slots=True)
class Window:
    """`cron`: five fields (minute hour day-of-month month day-of-week). `tz`: IANA name, e.g. "Europe/Berlin"."""

    cron: str
    policy: Policy
    tz: str = "UTC"

    def __post_init__(self) -> None:
        if len(self.cron.split()) != 5 or not croniter.is_valid(self.cron):
            raise InvalidSchedule(
                f"schedule {self.cron!r} is no cron expression: five fields expected, minute hour day month weekday, "
                'e.g. "0 22 * * *" for every day at 22:00'
            )
        try:
            ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise InvalidSchedule(
                f'time zone {self.tz!r} is not known: an IANA name expected, e.g. "UTC" or "Europe/Berlin"'
            ) from None

    def last_s(self, now_s: float) -> float | None:
        """The latest firing at or before now; None if there was none for a year."""
        zone = ZoneInfo(self.tz)
        # get_prev is strictly before its start: a firing at this very second counts.
        before = croniter(self.cron, datetime.fromtimestamp(int(now_s) + 1, zone)).get_prev(datetime)
        found_s = before.timestamp()
        return found_s if now_s - found_s < timedelta(days=_LOOK_BACK_DAYS).total_seconds() else None

    def next_s(self, now_s: float) -> float:
        """The first firing after now."""
        start = datetime.fromtimestamp(int(now_s), ZoneInfo(self.tz))
        return croniter(self.cron, start).get_next(datetime).timestamp()


@dataclass(frozen=True, slots=True)
class InForce:
    """The policy that holds, since when, and when a window fires next (None without windows)."""

    policy: Policy
    since_s: float
    until_s: float | None
    window: Window | None


def in_force(windows: Iterable[Window], set_by_hand: Policy, set_s: float, now_s: float) -> InForce:
    """What holds now. `set_by_hand` was set at `set_s`; among windows firing together the last in the list wins."""
    windows = tuple(windows)
    best = InForce(set_by_hand, set_s, None, None)
    for window in windows:
        last_s = window.last_s(now_s)
        if last_s is not None and last_s >= best.since_s:
            best = InForce(window.policy, last_s, None, window)
    until_s = min((w.next_s(now_s) for w in windows), default=None)
    return InForce(best.policy, best.since_s, until_s, best.window)


def preview(
    windows: Iterable[Window], set_by_hand: Policy, set_s: float, now_s: float, hours: float = 24.0
) -> list[tuple[float, Policy]]:
    """(from when, policy) over the coming hours, beginning with what holds now."""
    windows = tuple(windows)
    holds = in_force(windows, set_by_hand, set_s, now_s)
    out = [(now_s, holds.policy)]
    end_s = now_s + hours * 3600
    while holds.until_s is not None and holds.until_s < end_s:
        at_s = holds.until_s
        holds = in_force(windows, set_by_hand, set_s, at_s)
        if holds.policy != out[-1][1]:
            out.append((at_s, holds.policy))
    return out
