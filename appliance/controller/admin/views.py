"""Rows as the admin API shows them; the CLI relies on these keys."""

from __future__ import annotations

from typing import Any

from appliance.controller.engines.engine_sizes import EngineSizes
from appliance.controller.interfaces.model_states import ModelStates
from appliance.controller.interfaces.records import SchedulerStatus
from appliance.store.database import Database
from appliance.store.objects import models
from appliance.store.objects.adapters import AdapterRow
from appliance.store.records import canaries, deployments, model_settings
from appliance.store.rows import AuditRow, DeploymentRow, KeyRow, ModelRow, columns
from appliance.tiers.tiers import Tiers


def key(row: KeyRow) -> dict[str, Any]:
    limits = "models requests_per_minute tokens_per_minute tokens_per_day tokens_per_month bounds expires_s"
    return columns(row, f"id name scopes owner prefix created_s revoked_s {limits} max_priority")


def model(
    db: Database, row: ModelRow, status: SchedulerStatus, states: ModelStates, tiers: Tiers, sizes: EngineSizes
) -> dict[str, Any]:
    """`id` is its name, by which a list's next page is asked for. `max_model_len`: the context of its engines;
    `context_note`: why that is less than the model's own, else "". `settings_note`: why the box itself put these
    settings in force, else "".
    `adapter`: {"base", "base_version", "rank", "host"} if the active version is one; the engines of `host` serve it.
    `message`: why its engines fail, None if they do not."""
    found, running = deployments.find(db, row.id), canaries.find_running(db, row.id)
    size = sizes.size(row, None)
    set_up = model_settings.current(db, row.id)
    return {
        "id": row.id,
        "name": row.id,
        **columns(row, "kind arch task params bytes base active_version"),
        "canary_version": running.version if running is not None else None,
        "max_model_len": size.max_model_len,
        "context_note": size.problem or size.shortened,
        **columns(row, "source job_id created_s info"),
        "owner": row.owner or None,
        "shared_with": models.shared_with(db, row.id),
        "adapter": _adapter(db, row),
        "state": states.word(row.id),
        "message": states.message(row.id),
        "deployment": deployment(found, status) if found else None,
        "settings": set_up.settings if set_up else {},
        "settings_number": set_up.number if set_up else 0,
        "settings_note": set_up.note if set_up else "",
        "versions": [
            {
                **columns(v, "version created_s bytes source"),
                "kind": "adapter" if v.meta.get("adapter") else "version",
                "teacher": v.meta.get("teacher"),
                "pinned": bool(v.pinned),
                "held_back": bool(v.held_back),
                "tiers": tiers.tiers_of_version(row.id, v.version),
            }
            for v in models.list_versions(db, row.id)
        ],
    }


def deployment(row: DeploymentRow, status: SchedulerStatus) -> dict[str, Any]:
    """`failed_reason`: why its engines fail now, None if they do not."""
    failed = next((trouble["reason"] for trouble in status["troubles"] if trouble["model"] == row.model), None)
    return {
        **columns(row, "model min_replicas max_replicas tensor_parallel ttft_p95_s tpot_p95_ms"),
        "idle_sleep_s": row.idle.get("idle_sleep_s"),
        "pinned": bool(row.pinned),
        "failed_reason": failed,
    }


def _adapter(db: Database, row: ModelRow) -> dict[str, Any] | None:
    version = models.active(db, row)
    known = version.meta.get("adapter") if version else None
    if known is None:
        return None
    base = models.find(db, known["base"])
    adapter = AdapterRow(
        row.id, row.id, version.version, known["base"], known["base_version"], base.active_version if base else None
    )
    return {**known, "host": adapter.host}


def audit(row: AuditRow, by: str) -> dict[str, Any]:
    """`by`: the key's name, "box" for actions that needed none."""
    return {"id": row.id, "by": by, **columns(row, "key_id action target outcome detail request_id created_s")}
