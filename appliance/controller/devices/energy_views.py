"""Energy of a job, before it and after, and for everybody in a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.store.database import Database
from appliance.store.records import energy, usage
from appliance.store.rows import JobRow, columns
from runtime.devices.kind import Reading

J_PER_KWH = 3.6e6
WHOLE = 0.9
"""Nothing is told per step of a job that was metered for less of its time."""


def of_job(db: Database, row: JobRow, now_s: float) -> dict[str, Any] | None:
    """What a job has drawn so far: "joules", "kwh", "metered_share" (of the time that it held devices in which
    they counted), "joules_per_step", "joules_per_1000_tokens". None: its devices count nothing, or have not yet."""
    drawn = energy.of_job(db, row.id)
    if drawn is None:
        return None
    held_s = usage.device_s(db, [row.id], now_s)
    share = min(1.0, drawn.metered_s / held_s) if held_s else 1.0
    return {
        "joules": drawn.joules,
        "metered_share": share,
        "joules_per_step": _per(drawn.joules, row.step, share),
        "joules_per_1000_tokens": _per(drawn.joules * 1000, row.trained_tokens, share),
        "kwh": drawn.joules / J_PER_KWH,
    }


def estimate(
    db: Database,
    readings: Mapping[str, Reading],
    model: str,
    method: str,
    full: bool,
    device_hours: float,
) -> dict[str, Any] | None:
    """The "kwh" of a job to come, "watts_per_device" and "watts_from": "jobs", what jobs like it have drawn here, or
    "limit", the power limit of the devices, which they do not reach. None: neither is known."""
    watts, source = energy.watts_of_jobs_like(db, model, method, full), "jobs"
    if watts is None:
        limits = [one.power_limit_w for one in readings.values() if one.power_limit_w is not None]
        if not limits:
            return None
        watts, source = sum(limits) / len(limits), "limit"
    device_s = device_hours * 3600
    return {"watts_per_device": watts, "watts_from": source, "kwh": watts * device_s / J_PER_KWH}


def since(db: Database, since_s: float) -> list[dict[str, Any]]:
    """Energy of each job, of each model, and of devices that nobody held: see `energy.since`."""
    return [
        {
            **columns(one, "kind name joules metered_s steps tokens"),
            "joules_per_1000_tokens": _per(one.joules * 1000, one.tokens),
            "kwh": one.joules / J_PER_KWH,
        }
        for one in energy.since(db, since_s)
    ]


def _per(joules: float, count: int | None, share: float = 1.0) -> float | None:
    return joules / count if count and share >= WHOLE else None
