"""Profiles: limits of each device, and the times of day for which one holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TIMES = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_KEYS = ("limit_w", "clock_mhz")


class InvalidProfiles(ValueError):
    """The message says which profile or time of day cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Limits of each device; None: none is set."""

    name: str
    limit_w: float | None = None
    clock_mhz: int | None = None

    @classmethod
    def of(cls, name: str, limits: Mapping[str, float]) -> Profile:
        """Raises InvalidProfiles."""
        if name == "off":
            raise InvalidProfiles("the profile 'off' has no limits; give yours another name")
        if unknown := limits.keys() - set(_KEYS):
            raise InvalidProfiles(f"the profile {name!r} has {sorted(unknown)[0]!r}; expected {' or '.join(_KEYS)}")
        if not limits:
            raise InvalidProfiles(f"the profile {name!r} is empty; expected {' or '.join(_KEYS)}")
        if any(value <= 0 for value in limits.values()):
            raise InvalidProfiles(f"the profile {name!r} has a limit that is not above 0")
        clock = limits.get("clock_mhz")
        return cls(name, limits.get("limit_w"), None if clock is None else round(clock))

    def is_off(self) -> bool:
        return self.limit_w is None and self.clock_mhz is None


@dataclass(frozen=True, slots=True)
class Window:
    """A time of day, in minutes since midnight. One whose end is not after its begin goes over midnight."""

    text: str
    from_minute: int
    until_minute: int
    profile: str

    def has(self, minute: int) -> bool:
        if self.from_minute < self.until_minute:
            return self.from_minute <= minute < self.until_minute
        return minute >= self.from_minute or minute < self.until_minute


def windows_of(by_clock: Mapping[str, str]) -> tuple[Window, ...]:
    """Raises InvalidProfiles."""
    found = []
    for text, profile in by_clock.items():
        times = _TIMES.fullmatch(text)
        if times is None:
            raise InvalidProfiles(f"by_clock has {text!r}; expected a time of day such as 22:00-06:00")
        begin, end = (int(times[n]) * 60 + int(times[n + 1]) for n in (1, 3))
        if begin == end:
            raise InvalidProfiles(f"by_clock has {text!r}, which is no time at all; expected one such as 22:00-06:00")
        found.append(Window(text, begin, end, profile))
    return tuple(found)
