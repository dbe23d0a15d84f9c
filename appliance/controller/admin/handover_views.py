"""Hand-overs in the admin API: phase by phase, with bytes and seconds. The CLI and scripts rely on these keys."""

from __future__ import annotations

from typing import Any

from appliance.store.database import Database
from appliance.store.records import handovers
from appliance.store.rows import HandoverRow, HandoverStepRow, columns


def handover(db: Database, row: HandoverRow) -> dict[str, Any]:
    """`bytes` of all steps together; `asked_by` a key's name, "box" (a command on it), "window ID" or "scheduler"."""
    steps = [step(found) for found in handovers.steps(db, row.id)]
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
    return handover(db, row) if row else None


def step(row: HandoverStepRow) -> dict[str, Any]:
    """`seconds` of the whole step; `bytes` that it moved in `moved_s` of them; `path` how weights were loaded ("in
    place", "layerwise"), or that they or a snapshot are in shared memory. None for a step that moves nothing."""
    count, moved_s, path = _moved(row.verb, row.detail)
    return {
        **columns(row, "verb target state started_s ended_s"),
        "seconds": None if row.started_s is None or row.ended_s is None else row.ended_s - row.started_s,
        "bytes": count,
        "moved_s": moved_s,
        "bytes_per_s": count / moved_s if count and moved_s else None,
        "path": path,
        "undoes": row.arguments.get("undoes"),
        "detail": row.detail,
    }


def _moved(verb: str, detail: dict[str, Any]) -> tuple[int | None, float | None, str | None]:
    """(bytes, seconds in which they moved, path)."""
    if verb in ("swap_replica", "wake_replica"):
        read = detail.get("bytes_read") or []
        seconds, how = detail.get("load_s"), detail.get("how")
        return (sum(read) if read else detail.get("bytes")), seconds, how and how.replace("-", " ")
    if verb == "suspend_group" and detail.get("bytes"):
        return detail["bytes"], (detail.get("seconds") or {}).get("snapshot"), "shared memory"
    if verb in ("start_group", "start_replica"):
        # Read while processes start: most of the step is not copying, so no rate is computed.
        return detail.get("bytes"), None, "shared memory" if detail.get("bytes") else None
    return None, None, None
