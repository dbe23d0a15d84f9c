"""Hand-overs in the admin API: phase by phase, with bytes, seconds and the share of the hardware's limit.

Rows and the measured limits in, plain values out. The CLI and scripts rely on these keys.
"""

from __future__ import annotations

from typing import Any

from appliance.controller.devices import copy_limit
from appliance.store.database import Database
from appliance.store.records import handovers
from appliance.store.rows import HandoverRow, HandoverStepRow, columns


def handover(db: Database, row: HandoverRow, limits: dict[str, Any]) -> dict[str, Any]:
    """`bytes` of all steps together; `asked_by` a key's name, "box" (a command on it), "window ID" or "scheduler"."""
    steps = [step(found, limits) for found in handovers.steps(db, row.id)]
    return {
        **columns(row, "id reason state started_s ended_s"),
        "seconds": None if row.ended_s is None else row.ended_s - row.started_s,
        "bytes": sum(s["bytes"] or 0 for s in steps),
        "asked_by": row.detail.get("asked_by"),
        "asked_for": row.detail.get("asked_for"),
        "error": row.detail.get("error"),
        "detail": row.detail,
        "steps": steps,
    }


def by_id(db: Database, handover_id: str | None) -> dict[str, Any] | None:
    """None where there is none, or no more."""
    row = handovers.find(db, handover_id) if handover_id else None
    return handover(db, row, copy_limit.read(db)) if row else None


def step(row: HandoverStepRow, limits: dict[str, Any]) -> dict[str, Any]:
    """`seconds` of the whole step; `bytes` that it moved in `moved_s` of them, and that rate's share of the hardware's
    limit; `path` how weights were loaded ("in place", "layerwise"), or that they or a snapshot are in shared memory.
    None for a step that moves nothing."""
    count, moved_s, workers, path = _moved(row.verb, row.detail)
    rate = count / moved_s if count and moved_s else None
    limit, name = _limit(limits, workers)
    return {
        **columns(row, "verb target state started_s ended_s"),
        "seconds": None if row.started_s is None or row.ended_s is None else row.ended_s - row.started_s,
        "bytes": count,
        "moved_s": moved_s,
        "bytes_per_s": rate,
        "limit": name if rate and limit else None,
        "limit_fraction": rate / limit if rate and limit else None,
        "path": path,
        "undoes": row.arguments.get("undoes"),
        "detail": row.detail,
    }


def _moved(verb: str, detail: dict[str, Any]) -> tuple[int | None, float | None, int, str | None]:
    """(bytes, seconds in which they moved, parallel processes that moved them, path)."""
    if verb in ("swap_replica", "wake_replica"):
        read = detail.get("bytes_read") or []
        seconds, how = detail.get("load_s"), detail.get("how")
        return (sum(read) if read else detail.get("bytes")), seconds, max(1, len(read)), how and how.replace("-", " ")
    if verb == "suspend_group" and detail.get("bytes"):
        return detail["bytes"], (detail.get("seconds") or {}).get("snapshot"), 1, "shared memory"
    if verb in ("start_group", "start_replica"):
        # Read while processes start: most of the step is not copying, so no rate is computed.
        return detail.get("bytes"), None, 1, "shared memory" if detail.get("bytes") else None
    return None, None, 1, None


def _limit(limits: dict[str, Any], workers: int) -> tuple[float | None, str]:
    """A GPU's weights use its own bus; host memory is one limit for all."""
    per_gpu = limits.get("host_to_device_bytes_per_s")
    if per_gpu:
        return per_gpu * workers, "host_to_device"
    return limits.get("memcpy_bytes_per_s"), "memcpy"
