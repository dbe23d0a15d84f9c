"""Shows what devices tell of themselves: heat, power, use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.devices.kind import Reading

SHOWN = tuple(
    (
        "temperature_c slowdown_c power_w power_limit_w energy_j busy memory_used_bytes clock_hz throttled "
        "ecc_uncorrected at_s"
    ).split()
)


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Each device with `meters`, by the names of `runtime.devices.kind.Reading`; None of one that tells nothing."""
    return [{**device, "meters": _shown(readings.get(device["id"]))} for device in devices]


def _shown(reading: Reading | None) -> dict[str, Any] | None:
    return None if reading is None else {name: getattr(reading, name) for name in SHOWN}
