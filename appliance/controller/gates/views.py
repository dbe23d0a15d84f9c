"""Gates as the API shows them."""

from __future__ import annotations

from typing import Any

from appliance.controller.http.views import whose
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.objects import gates
from appliance.store.rows import GateRow, columns


def gate_object(row: GateRow, caller: Principal) -> dict[str, Any]:
    """`suites`: of each, the findings (`told` of gates.verdict) and the runs they are from; before the verdict, its
    rules. `answers`: whether the gate let the version have all requests."""
    return {
        "id": row.id,
        "object": "gate",
        "created_at": int(row.created_s),
        "job_id": row.job_id,
        "model": row.model,
        "version": row.version or None,
        "before": row.before or None,
        **columns(row, "state verdict reason"),
        "activated": bool(row.activated),
        **columns(row, "terms runs"),
        "suites": row.told,
        "decided_at": None if row.decided_s is None else int(row.decided_s),
        "ended_at": None if row.ended_s is None else int(row.ended_s),
    } | whose(row, caller)


def in_short(row: GateRow | None) -> dict[str, Any] | None:
    """As shown with a job."""
    if row is None:
        return None
    return columns(row, "id state verdict reason version before") | {"activated": bool(row.activated)}


def of_model(db: Database, model: str, most: int = 10) -> list[dict[str, Any]]:
    """As shown with a model, the newest first."""
    return [
        {"job_id": row.job_id, "decided_s": row.decided_s, **(in_short(row) or {})}
        for row in gates.of_model(db, model, most)
    ]
