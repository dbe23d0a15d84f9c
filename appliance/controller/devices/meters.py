"""Shows what devices tell of themselves: heat, power, use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.store.rows import columns
from runtime.devices.kind import Reading

SHOWN = (
    "temperature_c slowdown_c power_w power_limit_w energy_j busy memory_used_bytes clock_hz throttled "
    "ecc_uncorrected at_s"
)


def metered(devices: Sequence[dict[str, Any]], readings: Mapping[str, Reading]) -> list[dict[str, Any]]:
    """Each device with `meters`, by the names of `runtime.devices.kind.Reading`; None of one that tells nothing."""
    shown = {name: columns(reading, SHOWN) for name, reading in readings.items()}
    return [{**device, "meters": shown.get(device["id"])} for device in devices]
