"""When a device must not be used any more: a pure decision over what was read of it and who died on it.

Rules
- An Xid error that means the hardware, a device that does not answer, a row that could not be remapped: at once.
- Uncorrected ECC errors that were not there when the watch began: at once.
- Hotter than its slowdown temperature for `hot_for_s`: the cooling has failed, not the load.
- `deaths` ranks or engines that died on it within `death_window_s`. A job or model that died on more than one device
  in that time is itself at fault, and its deaths count against none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.devices.kind import Reading
from scheduler.core.config import SchedulerConfig

# Xids that an application causes (a bad kernel, a killed process); every other one is taken for the device's.
# NVIDIA k8s-device-plugin, internal/rm/health.go, "application errors".
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True, slots=True)
class Death:
    """A rank or engine that ended without being asked to. `holder`: its job or model, the same over restarts."""

    device_id: str
    holder: str
    at_s: float
    reason: str = ""


def failing(
    readings: Mapping[str, tuple[Reading, ...]], deaths: Iterable[Death], now_s: float, config: SchedulerConfig
) -> dict[str, str]:
    """Device id to one sentence why it must not be used, for every device that must not.

    `readings`: by device, oldest first, the first being the one that the watch began with.
    """
    found = {}
    for device_id, told in readings.items():
        if told and (reason := _told(told, config.hot_for_s)):
            found[device_id] = reason
    for device_id, reason in _died(deaths, now_s, config).items():
        found.setdefault(device_id, reason)
    return found


def _told(told: tuple[Reading, ...], hot_for_s: float) -> str:
    last = told[-1]
    if last.lost:
        return f"does not answer any more ({last.lost})"
    xids = sorted({xid for reading in told for xid in reading.xids} - APPLICATION_XIDS)
    if xids:
        return f"reported Xid {', '.join(map(str, xids))}"
    if last.remap_failed:
        return "could not remap a row of its memory"
    if last.ecc_uncorrected is not None and told[0].ecc_uncorrected is not None:
        more = last.ecc_uncorrected - told[0].ecc_uncorrected
        if more > 0:
            return f"had {more} uncorrected memory error{'s' * (more > 1)}"
    hot_since_s = None
    for reading in reversed(told):
        if reading.temperature_c is None or reading.slowdown_c is None or reading.temperature_c < reading.slowdown_c:
            break
        hot_since_s = reading.at_s
    if hot_since_s is not None and last.at_s - hot_since_s >= hot_for_s:
        return f"was at {last.temperature_c} °C for {last.at_s - hot_since_s:.0f} s, over its {last.slowdown_c} °C"
    return ""


def _died(deaths: Iterable[Death], now_s: float, config: SchedulerConfig) -> dict[str, str]:
    if not config.device_deaths:
        return {}
    recent = [death for death in deaths if death.at_s > now_s - config.death_window_s]
    places: dict[str, set[str]] = {}
    for death in recent:
        places.setdefault(death.holder, set()).add(death.device_id)
    counted: dict[str, list[Death]] = {}
    for death in recent:
        if len(places[death.holder]) == 1:
            counted.setdefault(death.device_id, []).append(death)
    return {
        device_id: f"{len(here)} processes died on it within {config.death_window_s:.0f} s, the last: {here[-1].reason}"
        for device_id, here in counted.items()
        if len(here) >= config.device_deaths
    }
