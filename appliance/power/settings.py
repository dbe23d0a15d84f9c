"""[power]: the settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from appliance.power.profiles import InvalidProfiles, Profile, Window, windows_of
from scheduler.core.workload import POLICIES

OFF = "off"
"""The profile without limits, which every box has."""


class PowerSettings(BaseModel):
    """Power limits of the devices, and what energy costs (docs/operations.md, Power and energy)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    helper_socket: str | None = Field(
        None,
        description="socket of the power helper, which sets limits as root, such as `/run/appliance-power/socket`; "
        "unset: the box sets none",
    )
    profiles: dict[str, dict[str, float]] = Field(
        {},
        description="by name: `limit_w`, the power limit of each device in watts, and `clock_mhz`, the highest clock "
        "of its processors; one of them is enough; `off` is the profile without limits",
    )
    by_mode: dict[str, str] = Field(
        {}, description="the profile for each mode (serve, train, split, auto); a mode without one has `off`"
    )
    by_clock: dict[str, str] = Field(
        {},
        description="the profile for each time of day on the box's clock, such as `22:00-06:00`, whatever the mode is; "
        "of those that overlap, the first counts",
    )
    price_per_kwh: float | None = Field(None, ge=0, description="of electricity; unset: costs are not told")
    price_per_device_hour: float | None = Field(
        None, ge=0, description="of a device, whatever it draws, for `plan job`; unset: it is not told"
    )
    currency: str = Field("EUR", min_length=1, max_length=8, description="of the prices")
    pue: float = Field(
        1.0, ge=1, le=10, description="power usage effectiveness: what the site draws for each watt of the machine"
    )
    rest_w_per_device: float = Field(
        0.0,
        ge=0,
        description="watts that the machine draws for each device beside what the device itself counts: processors, "
        "memory, fans",
    )

    @model_validator(mode="after")
    def _known(self) -> PowerSettings:
        try:
            for name, limits in self.profiles.items():
                Profile.of(name, limits)
            windows_of(self.by_clock)
        except InvalidProfiles as error:
            raise ValueError(str(error)) from error
        for mode in self.by_mode:
            if mode not in POLICIES:
                raise ValueError(f"by_mode has {mode!r}; expected {', '.join(POLICIES)}")
        for name in (*self.by_mode.values(), *self.by_clock.values()):
            if name not in (OFF, *self.profiles):
                raise ValueError(f"no profile {name!r}; there are {', '.join((OFF, *self.profiles))}")
        return self

    def profile(self, name: str) -> Profile:
        """One of `profiles`, or `off`. Raises InvalidProfiles."""
        return Profile(name) if name == OFF else Profile.of(name, self.profiles[name])

    @property
    def windows(self) -> tuple[Window, ...]:
        return windows_of(self.by_clock)

    def wanted(self, mode: str, minute: int) -> tuple[Profile, str]:
        """The profile for this mode at this minute of the day, and what it follows from."""
        for window in self.windows:
            if window.has(minute):
                return self.profile(window.profile), f"the clock: {window.text}"
        return self.profile(self.by_mode.get(mode, OFF)), f"the mode: {mode}"

    def tariff(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("price_per_kwh", "currency", "pue", "rest_w_per_device")}
