"""Converts rows to objects of the API. OpenAI's have times in whole seconds, and its six statuses for our phases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from appliance.controller.access.naming import Resolved
from appliance.controller.interfaces.records import ModelStates
from appliance.store.database import Database
from appliance.store.rows import (
    HANDOVERS,
    FileRow,
    HandoverRow,
    JobEventRow,
    JobJudgeRow,
    JobRow,
    VersionRow,
    columns,
)
from scheduler.handover.ports import StepRecord
from train.methods.methods import DEFAULT, METHODS

# OpenAI has no "paused" or "suspended"; the events say which it is and why.
_STATUS_OF_PHASE = {"validating": "validating_files", "suspended": "queued"}
_OPENAI_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
_WORKED_OUT = ("n_epochs", "batch_size")


def file_object(row: FileRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": int(row.created_s),
        "expires_at": None if row.expires_s is None else int(row.expires_s),
        **columns(row, "filename purpose status status_details"),
        **_data_check(row),
        "owner": row.owner or None,
    }


def _data_check(row: FileRow) -> dict[str, Any]:
    """For training data: how far its check is, and how many examples each found something in, where the row has it."""
    if row.check_status is None:
        return {}
    found = (row.data_check or {}).get("checks", {})
    counts = {name: one["count"] for name, one in found.items() if one["count"]}
    return {"check": {"status": row.check_status, **({"found": counts} if row.data_check else {})}}


def job_status(row: JobRow) -> str:
    """An accepted cancellation is final, so it shows before the devices are free."""
    if row.wanted == "cancel" and not row.finished:
        return "cancelled"
    return _STATUS_OF_PHASE.get(row.phase, row.phase)


def job_phase(row: JobRow) -> str:
    """The detailed phase for operators: also pausing, paused, cancelling."""
    if row.finished:
        return row.phase
    if row.wanted == "cancel":
        return "cancelling"
    if row.wanted == "pause":
        return "pausing" if row.phase == "running" else "paused"
    return row.phase


def hyperparameters(row: JobRow) -> dict[str, Any]:
    """The requested values, with "auto" replaced by its result; a multiplier of "auto" is 1."""
    own = [option.name for option in METHODS[row.method].options]
    values = {name: "auto" for name in (*_OPENAI_HYPERPARAMETERS, *own)} | row.hyperparameters
    if row.resolved:
        values |= {name: row.resolved["options"][name] for name in own if values[name] == "auto"}
        values |= {name: row.resolved[name] for name in _WORKED_OUT if values[name] == "auto"}
        if values["learning_rate_multiplier"] == "auto":
            values["learning_rate_multiplier"] = 1.0
    return values


_JOB_COLUMNS = (
    "reason output_model verdict gate devices min_devices max_devices allowed_sizes priority deadline_s step"
    " total_steps loss valid_loss tokens_per_s eta_s snapshot resolved created_s started_s finished_s"
)


def job_object(row: JobRow, organization: str, judge: JobJudgeRow | None = None) -> dict[str, Any]:
    """OpenAI's object, and what the box knows of the job; times that end in `_s` are Unix times with fractions. judge:
    of a job that has one."""
    said = judge.judge if judge is not None else {}
    status, succeeded, trained_with = job_status(row), row.phase == "succeeded", hyperparameters(row)
    return {
        "id": row.id,
        "object": "fine_tuning.job",
        "created_at": int(row.created_s),
        **columns(row, "error model result_files seed training_file validation_file metadata"),
        "fine_tuned_model": row.output_model if succeeded else None,
        "finished_at": None if row.finished_s is None else int(row.finished_s),
        # OpenAI has them here for its first method alone.
        "hyperparameters": trained_with if row.method == DEFAULT.name else {},
        "organization_id": f"org-{organization}",
        "status": status,
        "trained_tokens": row.trained_tokens if succeeded else None,
        "user_provided_suffix": row.suffix,
        "estimated_finish": int(time.time() + row.eta_s) if row.eta_s is not None and status == "running" else None,
        "integrations": row.integrations or [],
        "method": {"type": row.method, row.method: said | {"hyperparameters": trained_with}},
        "phase": job_phase(row),
        "publish_as": row.output_model if row.stable_name else None,
        "owner": row.owner or None,
        **{name: bool(getattr(row, name)) for name in ("activate", "preemptible", "held")},
        **columns(row, _JOB_COLUMNS),
    }


def event_object(row: JobEventRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "fine_tuning.job.event",
        "created_at": int(row.created_s),
        **columns(row, "level message type"),
        "data": row.data if row.data is not None else {},
    }


def checkpoint_object(row: VersionRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(row.created_s),
        "fine_tuned_model_checkpoint": row.checkpoint,
        "fine_tuning_job_id": row.job_id,
        "metrics": {"step": row.step, **row.metrics},
        "step_number": row.step,
    }


def model_object(resolved: Resolved, states: ModelStates, context: int | None) -> dict[str, Any]:
    """OpenAI's object, plus the box's fields: its context in tokens, what the model does now, and why if it does not
    serve."""
    made_s = resolved.version.created_s if resolved.is_checkpoint or resolved.pinned else resolved.model.created_s
    return {
        "id": resolved.name,
        "object": "model",
        "created": int(made_s),
        "owned_by": resolved.model.owned_by,
        "max_model_len": context,
        "state": states.word(resolved.name),
        "state_details": states.message(resolved.name),
    }


# --- hand-overs; the CLI and scripts rely on these keys


def handover_object(row: HandoverRow) -> dict[str, Any]:
    """`bytes` of all steps together; `asked_by` a key's name, "box" (a command on it), "window ID" or "scheduler"."""
    steps = [step_view(step) for step in row.steps]
    return {
        "id": str(row.id),
        **columns(row, "reason started_s ended_s"),
        "state": row.state or "running",
        "seconds": None if row.ended_s is None else row.ended_s - row.started_s,
        "bytes": sum(s["bytes"] or 0 for s in steps),
        **{name: getattr(row, name) or None for name in ("asked_by", "asked_for", "error")},
        "steps": steps,
    }


def handover_by_id(db: Database, handover_id: str | None) -> dict[str, Any] | None:
    """None where there is none, or no more."""
    row = HANDOVERS.find(db, handover_id) if handover_id else None
    return handover_object(row) if row else None


def step_view(row: StepRecord) -> dict[str, Any]:
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
        **columns(row, "undoes detail"),
    }


def _moved(verb: str, detail: Mapping[str, Any]) -> tuple[int | None, float | None, str | None]:
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
