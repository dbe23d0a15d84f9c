"""Stores reports of running jobs (metrics rows, OpenAI events, checkpoints, versions, the end) and people's requests to
cancel, pause or resume a job. A job whose key loses its rights is paused.

Events come from rank 0 through the group (see train.control.group); each is ingested in one transaction, and ingesting
one twice (after a crash between the commit and its acknowledgement) changes nothing but a repeated event line.
"""

from __future__ import annotations

import base64
import csv
import io
import math
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from appliance.controller.access.model_access import (
    base_of,
    caller_may_use,
    checkpoint_name,
    may_use,
    resolve,
    unknown_model,
)
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import storage
from appliance.controller.http.resource import Resource
from appliance.controller.interfaces.errors import Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Principal
from appliance.controller.models.capacity import gb
from appliance.store import jobs, keys, models
from appliance.store.database import Database, IllegalTransition
from appliance.store.rows import (
    VERSIONS,
    JobEventRow,
    JobMetricRow,
    JobRow,
    JobWanted,
    ModelRow,
    VersionRow,
    columns,
    new_id,
)
from train.methods.methods import METHODS

Level = Literal["info", "warn", "error"]
_ETA_WINDOW_STEPS = 20
_OF_STEP = ("epoch", "loss", "grad_norm", "learning_rate", "tokens_per_s", "devices", "memory_bytes", "rank_seconds")
_OF_TRAINING = ("loss", "mean_token_accuracy")
"""Called "train_…" in a step's event, as OpenAI does."""
_OF_VALIDATION = ("loss", "mean_token_accuracy", "mean_reward")
"""Called "full_valid_…" too, as OpenAI does: all of the file is read."""
_COLUMNS = {
    "mean_token_accuracy": ("train_accuracy", "valid_mean_token_accuracy"),
    "mean_reward": ("train_reward_mean", "valid_reward_mean"),
}
"""OpenAI's columns of a result file, where they are others than "train_" and "valid_" before the name."""
VALIDATIONS = "validations"
"""The kind of task that checks new jobs (settings.py)."""
TRAINING_FAILED = "training_failed"
"""The code of a job that failed once it ran."""
_NOTHING_TRAINED = (
    "Nothing was trained: in all {} steps all answers to a prompt got the same reward. Give a grader that tells better "
    "answers from worse ones (a score in place of right or wrong), easier or harder prompts, or more answers for each "
    "prompt (compute_multiplier)."
)


def add_message(
    db: Database,
    job_id: str,
    text: str,
    *,
    level: Level = "info",
    data: dict[str, Any] | None = None,
    kind: Literal["message", "metrics"] = "message",
) -> None:
    row = JobEventRow(new_id("ftevent-"), job_id, level, kind, text, time.time(), data)
    jobs.insert_event(db, row)


def fail(db: Database, job_id: str, code: str, message: str, param: str | None = None) -> None:
    """Mark a job as failed with OpenAI's error object. Raises IllegalTransition if it has already ended."""
    with db.transaction():
        jobs.set_phase(db, job_id, "failed", error={"code": code, "message": message, "param": param}, reason=message)
        add_message(db, job_id, f"The job failed: {message}", level="error", data={"code": code, "param": param})


def answers_at_once(db: Database, job: JobRow, new: VersionRow) -> bool:
    """Return whether a job's version becomes active at once: if the job requests it, or no version or one of the job's
    own is active. Never if the active version is of the other kind (adapter, full weights), whose engines would have to
    stop first, nor if the job has a gate."""
    active = resolve(db, job.output_model)
    if job.gate is not None or active is None:
        return job.gate is None
    if bool(active.version.meta.get("adapter")) is not bool(new.meta.get("adapter")):
        return False
    return bool(job.activate) or active.version.job_id == job.id


def serve_if_allowed(db: Database, row: JobRow, version: str) -> bool:
    """Activate a job's version and deploy its model, if the job may do that. Returns whether it did."""
    if not answers_at_once(db, row, VERSIONS.get(db, row.output_model, version)):
        models.update_version(db, row.output_model, version, held_back=1)
        return False
    models.serve(db, row.output_model, version)
    return True


class JobEvents:
    """Ingests the events of running jobs. organization: owner of the models they create (from ControllerConfig)."""

    def __init__(self, db: Database, files_dir: Path, organization: str):
        self._db, self._files_dir, self._organization = db, files_dir, organization
        self._handlers = {
            "metrics": self._metrics,
            "steps": self._steps,
            "validation": self._validation,
            "published": self._published,
            "snapshot": self._snapshot,
            "message": self._message,
        }

    def ingest(self, job_id: str, event: dict[str, Any]) -> None:
        """Ingest an event of `train.control.group`; events without a handler change nothing. Raises RowNotFound."""
        # JSON has no NaN or infinity: a gradient norm that overflowed is reported as unknown.
        event = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
        if (handler := self._handlers.get(event["event"])) is not None:
            with self._db.transaction():
                handler(jobs.get(self._db, job_id), event)

    def started(self, job_id: str, devices: list[str]) -> None:
        """Record that the job's ranks run on these devices."""
        db = self._db
        with db.transaction():
            row = jobs.get(db, job_id)
            jobs.set_phase(db, job_id, "running", devices=devices, reason="")
            # The snapshot's step, not the last one reported: a sudden end loses the training after the snapshot.
            beginning = f"continues at step {row.snapshot['step']}" if row.snapshot else "started"
            text = f"Fine-tuning job {beginning} on {len(devices)} device(s)"
            add_message(db, job_id, text, data={"devices": devices})

    def resumed(self, job_id: str, step: int) -> None:
        """Record that the job's ranks begin after `step`, and which steps they repeat."""
        # Not the row's step, which was already reset to the snapshot's.
        reached = jobs.last_step(self._db, job_id)
        if (lost := reached - step) > 0:
            text = f"The job resumed from step {step}: {lost} steps up to step {reached} are repeated"
            add_message(self._db, job_id, text, data={"step": step, "steps_anew": lost})

    def suspended(self, job_id: str, step: int, reason: str) -> None:
        """Record that the job left its devices, with its state in the snapshot of this step."""
        with self._db.transaction():
            jobs.set_phase(self._db, job_id, "suspended", step=step, reason=reason)
            text = f"Fine-tuning job suspended at step {step}: {reason}"
            add_message(self._db, job_id, text, data={"step": step})

    def conclude(self, job_id: str) -> None:
        """Make the result file of a job whose ranks have ended. On a full disk the job succeeds without the file,
        because an error would stop the scheduler's loop."""
        db, row = self._db, jobs.get(self._db, job_id)
        table = _metrics_table(db, row)
        try:
            file_id = storage.make_result(db, self._files_dir, table, "step_metrics.csv", row.owner)
            jobs.update(db, job_id, result_files=[file_id])
        except OSError as error:
            where = f"`GET /v1/fine_tuning/jobs/{row.id}/metrics` has them"
            message = f"The table of its steps could not be written: {error.strerror}. {where}"
            add_message(db, row.id, message, level="warn")
        self._compare(row)

    def _compare(self, row: JobRow) -> None:
        """Store the measured memory and speed with the estimate, once."""
        steps, estimate = list(jobs.all_metrics(self._db, row.id)), row.estimate or {}
        speeds = [step.tokens_per_s / step.devices for step in steps if step.tokens_per_s and step.devices]
        if "devices" not in estimate or estimate.get("measured") or not speeds:
            return
        peak_bytes = max((step.memory_bytes or 0 for step in steps), default=0)
        measured = {"device_bytes": peak_bytes or None, "tokens_per_s": median(speeds) * estimate["devices"]}
        jobs.update(self._db, row.id, estimate=estimate | {"measured": measured})
        text = " and ".join(
            f"{shown(measured[name])} (estimated {shown(estimate[name])})"
            for name, shown in (("tokens_per_s", "{:,.0f} tokens/s".format), ("device_bytes", gb))
            if measured[name] and estimate[name]
        )
        if text:
            add_message(self._db, row.id, f"On {estimate['devices']} devices it took {text}.")

    def succeeded(self, job_id: str) -> None:
        """End the job successfully: its newest published version becomes the model."""
        db = self._db
        with db.transaction():
            row = jobs.get(db, job_id)
            if row.finished:
                return
            versions = models.versions_made_by(db, job_id)
            if not versions:
                fail(db, job_id, "nothing_published", "The job ended without publishing weights; see its log.")
                return
            if not row.result_files:  # if the controller restarted between the two writes
                self.conclude(job_id)
            if METHODS[row.method].judged_by == "grader":
                steps = [m for m in jobs.all_metrics(db, job_id) if 0 < m.step <= versions[-1].step]
                # If all answers to each prompt of a step got the same reward, the step trained nothing.
                if steps and all((m.measured or {}).get("equal_rewards") == 1.0 for m in steps):
                    fail(db, job_id, "nothing_trained", _NOTHING_TRAINED.format(len(steps)))
                    return
            result = versions[-1]
            meta = {name: value for name, value in result.meta.items() if name != "of_epoch"}
            models.update_version(db, row.output_model, result.version, meta=meta)
            message = self._serve_result(row, result.version)
            # Not the row's step, which is the snapshot's if the job was suspended after its last step.
            jobs.update(db, job_id, step=jobs.last_step(db, job_id) or row.step)
            jobs.set_phase(db, job_id, "succeeded", reason="")
            add_message(db, job_id, message)
            add_message(db, job_id, "The job has successfully completed")

    def _serve_result(self, row: JobRow, version: str) -> str:
        """Activate the job's result if the job allows that. Returns the message of its event."""
        db, name = self._db, row.output_model
        before = model.active_version if (model := models.find(db, name)) is not None else None
        activated = serve_if_allowed(db, row, version)
        if not row.stable_name:
            return f"New fine-tuned model created: {name}"
        if row.gate is not None:
            return f"New version of {name}: {version}. Its gate decides whether it answers."
        if not activated:
            return (
                f"New version of {name}: {version}. {before} goes on answering; `appliance model canary {name} "
                f"{version}` gives the new one a share of the requests, `appliance model rollback {name} --version "
                f"{version}` all of them."
            )
        replaced = f" in place of {before}" if before not in (None, version) else ""
        return f"New version of {name}: {version}, which answers{replaced}"

    def cancelled(self, job_id: str) -> None:
        """Record the end of a cancelling job, whose ranks have ended."""
        with self._db.transaction():
            if not jobs.get(self._db, job_id).finished:
                jobs.set_phase(self._db, job_id, "cancelled", reason="cancelled by request")

    def _metrics(self, row: JobRow, event: dict[str, Any]) -> None:
        db, step, at_s = self._db, int(event["step"]), event.pop("at_s", None)
        # A repeated step, for example after the death of a rank, counts once.
        before = jobs.find_metric(db, row.id, step)
        if before is not None and before.created_s == at_s:
            return  # an event that an earlier controller recorded, delivered again
        # The event's time, not the time of reading: after a controller's restart many steps are read at once.
        created_s, measured = time.time() if at_s is None else float(at_s), _measured(row, event, "train_")
        of_step = {name: event.get(name) for name in _OF_STEP}
        jobs.upsert_metric(db, JobMetricRow(row.id, step, created_s, measured=measured, **of_step))
        total = event.get("total_steps") or row.total_steps
        tokens = (row.trained_tokens or 0) + (int(event.get("tokens") or 0) if before is None else 0)
        latest = {"loss": event.get("loss"), "tokens_per_s": event.get("tokens_per_s")}
        # The estimate uses the median time of the last steps, so that a suspension does not distort it.
        recent = jobs.last_metrics(db, row.id, _ETA_WINDOW_STEPS)
        gaps = sorted((b.created_s - a.created_s) / (b.step - a.step) for a, b in zip(recent, recent[1:], strict=False))
        eta_s = None if not gaps or total is None else max(0.0, gaps[len(gaps) // 2] * (total - step))
        jobs.update(db, row.id, step=step, total_steps=total, eta_s=eta_s, trained_tokens=tokens, **latest)
        data = {key: value for key, value in event.items() if key not in ("event", "job", *_OF_TRAINING)}
        data |= {f"train_{key}": event[key] for key in _OF_TRAINING if key in event}
        reward = event.get("train_mean_reward")
        shown = _shown("training loss", event.get("loss")) if reward is None else _shown("mean reward", reward)
        add_message(db, row.id, f"Step {step}/{total}: {shown}", data=data, kind="metrics")

    def _steps(self, row: JobRow, event: dict[str, Any]) -> None:
        """Record the newest steps before a snapshot, which a killed box may not have recorded."""
        for report in event["steps"]:
            self._metrics(jobs.get(self._db, row.id), {**report, "event": "metrics"})

    def _validation(self, row: JobRow, event: dict[str, Any]) -> None:
        db, step, loss = self._db, int(event["step"]), event.get("loss")
        metric = JobMetricRow(row.id, step, time.time(), valid_loss=loss, valid_measured=_measured(row, event))
        jobs.upsert_metric(db, metric)
        jobs.update(db, row.id, valid_loss=loss)
        total = event.get("total_steps") or row.total_steps  # before the first step only the event has the value
        known = ("event", "job", "step", "total_steps")
        data = {"step": step, "total_steps": total}
        data |= _of_validation({key: value for key, value in event.items() if key not in known})
        reward = event.get("mean_reward")
        shown = _shown("validation loss", loss) if reward is None else _shown("validation mean reward", reward)
        add_message(db, row.id, f"Step {step}/{total}: {shown}", data=data, kind="metrics")

    def _published(self, row: JobRow, event: dict[str, Any]) -> None:
        db, step, version = self._db, int(event["step"]), str(event["version"])
        if models.find(db, row.output_model) is None:
            base = resolve(db, row.model)  # the model was deleted during training
            fields: dict[str, Any] = {"arch": "unknown", "params": 0}
            if base is not None:
                fields = columns(base.model, "arch params max_model_len info")
            fields |= {"owner": row.owner, "owned_by": f"org-{self._organization}", "source": f"job {row.id}"}
            fields |= {"base": row.model, "job_id": row.id, "bytes": int(event["bytes"]), "created_s": time.time()}
            models.insert(db, ModelRow(row.output_model, "fine-tuned", **fields))
        if models.find_version(db, row.output_model, version) is not None:
            return
        meta = {name: event.get(name) for name in ("epoch", "seconds")}
        publish = (row.resolved or {}).get("publish")
        if publish in ("checkpoints", "best"):
            meta["of_epoch"] = True  # until it becomes the job's result
        if event.get("adapter"):
            meta["adapter"] = event["adapter"]
        of_job: dict[str, Any] = {"id": new_id("ftckpt_"), "checkpoint": checkpoint_name(row, step)}
        of_job |= {"job_id": row.id, "step": step, "metrics": self._measured_at(row.id, step)}
        stored: dict[str, Any] = {"bytes": int(event["bytes"]), "shm_path": str(event["path"]), "meta": meta}
        source, now_s = f"job {row.id}", time.time()
        new = VersionRow(row.output_model, version, source, created_s=now_s, **stored, **of_job)
        # This includes earlier epochs, and epochs of a job that does not reach its end.
        held_back = publish != "epoch" or not answers_at_once(db, row, new)
        models.insert_version(db, replace(new, held_back=int(held_back)))
        kind = "Checkpoint (adapter)" if event.get("adapter") else "Checkpoint"
        data = {"step": step, "job_id": row.id, **meta}
        add_message(db, row.id, f"{kind} created at step {step}", data=data)

    def _snapshot(self, row: JobRow, event: dict[str, Any]) -> None:
        """Record a snapshot. Only the first has an event: small models write snapshots at nearly every step."""
        jobs.update(self._db, row.id, snapshot={"step": int(event["step"]), "path": str(event["path"])})
        if row.snapshot is None:
            data = {key: event[key] for key in ("step", "bytes", "seconds")}
            text = f"Snapshot of step {event['step']}: {gb(event['bytes'])} in {event['seconds']:.3g} s"
            add_message(self._db, row.id, text, data=data)

    def _message(self, row: JobRow, event: dict[str, Any]) -> None:
        add_message(self._db, row.id, str(event["text"]), level=event.get("level", "info"))

    def _measured_at(self, job_id: str, step: int) -> dict[str, float]:
        row = jobs.find_metric(self._db, job_id, step)
        if row is None:
            return {}
        trained = {"loss": row.loss, **(row.measured or {})}
        metrics = {f"train_{name}": value for name, value in trained.items()}
        metrics |= _of_validation({"loss": row.valid_loss, **(row.valid_measured or {})})
        return {name: value for name, value in metrics.items() if value is not None}


def _shown(name: str, value: float | None) -> str:
    return f"{name}=not finite" if value is None else f"{name}={value:.4f}"


def _measured(row: JobRow, event: dict[str, Any], prefix: str = "") -> dict[str, float] | None:
    """Return the values in an event that the job's method measures besides the loss."""
    values = {name: event.get(f"{prefix}{name}", event.get(name)) for name in METHODS[row.method].measured}
    return {name: value for name, value in values.items() if value is not None} or None


def _of_validation(scores: dict[str, Any]) -> dict[str, Any]:
    """Return a validation's scores by OpenAI's names; a score of the full file has two names."""
    whole = {f"full_valid_{name}": scores[name] for name in _OF_VALIDATION if name in scores}
    return {f"valid_{name}": value for name, value in scores.items()} | whole


def _metrics_table(db: Database, job: JobRow) -> bytes:
    """Return a result file's content in OpenAI's form: CSV in base64, one line per step; extra columns for other
    methods."""
    out = io.StringIO()
    writer = csv.writer(out)
    first, *others = METHODS[job.method].measured
    train, valid = _COLUMNS.get(first, (f"train_{first}", f"valid_{first}"))
    more = [f"{part}_{name}" for name in others for part in ("train", "valid")]
    writer.writerow(["step", "train_loss", train, "valid_loss", valid, *more])
    for m in jobs.all_metrics(db, job.id):
        if m.step > 0:  # step 0 measures the starting model
            trained, validated = m.measured or {}, m.valid_measured or {}
            values = [value for name in others for value in (trained.get(name), validated.get(name))]
            writer.writerow([m.step, m.loss, trained.get(first), m.valid_loss, validated.get(first), *values])
    return base64.b64encode(out.getvalue().encode())


# --- requests to cancel, pause or resume a job, which the scheduler carries out

_ABSENT = ("Could not find fine tune: {}", "fine_tune_id", "fine_tune_not_found")
_RECORDED = ("status", "model", "training_file", "validation_file")
JOBS = Resource("job", "/v1/fine_tuning/jobs", (FINE_TUNING,), jobs.find_visible, *_ABSENT, fields=_RECORDED)
KEY_REVOKED = (
    "Its API key was revoked or has expired; its owner with another key, or an operator, can resume it "
    "(`appliance job resume`)."
)
MODEL_WITHDRAWN = (
    "Its API key may not use the model that it trains any more: the sharing has ended, or the key's list of models was "
    "cut. Once it may again, its owner or an operator can resume it (`appliance job resume`)."
)
_MESSAGES = {
    "cancel": "Fine-tuning job cancelled by request.",
    "pause": "Fine-tuning job paused by request; its status stays 'queued' until it is resumed.",
    "run": "Fine-tuning job resumed by request.",
}


def set_wanted(context: ControllerContext, job_id: str, wanted: JobWanted, caller: Principal) -> JobRow:
    """Record that the caller wants the job to run, pause or end. Raises NotFound, Conflict."""
    db = context.db
    row = JOBS.known(db, job_id, caller)
    verb = "resume" if wanted == "run" else wanted
    try:
        with db.transaction():
            if wanted == "run" and row.wanted == "pause" and not row.finished:
                row = _taken_over(db, row, caller)
            after = jobs.set_wanted(db, job_id, wanted)
            # A job without devices ends at once; a running one when the scheduler has stopped its ranks.
            if wanted == "cancel" and not row.finished and row.phase != "running":
                jobs.set_phase(db, job_id, "cancelled", reason="cancelled by request")
            if after.wanted != row.wanted:
                add_message(db, job_id, _MESSAGES[wanted])
            after = jobs.get(db, job_id)
    except IllegalTransition as error:
        message = f"The fine-tuning job {job_id} is {error.found}; it cannot be asked to {verb} any more."
        raise Conflict(message, "fine_tune_id", "invalid_job_state") from error
    if wanted == "cancel":
        context.tasks.restart(VALIDATIONS, job_id)  # frees the validation's slot
    context.scheduler.nudge(f"{verb} of {job_id}")
    return after


def max_priority(db: Database, caller: Principal) -> int:
    """Return the highest priority that jobs of the caller's key may have; 0 for a caller without a key."""
    key = keys.find(db, caller.key_id) if caller.key_id else None
    return 0 if key is None else key.max_priority


def _taken_over(db: Database, row: JobRow, caller: Principal) -> JobRow:
    """Return the job as the caller resumes it. If its key was revoked, it becomes a job of the caller's key, reduced to
    that key's claims; not if an admin resumes it. Raises NotFound once the caller's or the job's key may not use the
    model that the job trains."""
    if not caller.is_admin and keys.how_ended(db, row.key_id):
        most = max_priority(db, caller)
        claims: dict[str, Any] = {} if most > 0 else {"preemptible": 1, "deadline_s": None}
        claims["priority"] = min(row.priority, most)
        if lost := sorted(name for name, value in claims.items() if getattr(row, name) != value):
            text = f"It was resumed with an API key that may claim less; changed: {', '.join(lost)}."
            add_message(db, row.id, text, level="warn")
        jobs.update(db, row.id, key_id=caller.key_id, **claims)
        row = jobs.get(db, row.id)
    if not caller_may_use(db, caller, row.model) or base_of(db, row) is None:
        raise unknown_model(row.model)
    return row


def pause_reason(db: Database, row: JobRow) -> str | None:
    """Return a paused job's reason, shown in place of the planner's; None: show the planner's reason."""
    if row.wanted != "pause":
        return None
    if keys.how_ended(db, row.key_id):
        return KEY_REVOKED
    return None if may_use(db, row.key_id, row.model) else MODEL_WITHDRAWN


def pause_jobs_of(db: Database, key_id: str) -> list[str]:
    """Pause the jobs of a revoked key; returns their ids. They are not cancelled, because the owner with another key,
    or a successor, may want the results so far."""
    return _pause(db, [row for row in jobs.list_unfinished(db) if row.key_id == key_id], KEY_REVOKED)


def pause_jobs_without_model(db: Database) -> list[str]:
    """Pause the jobs whose keys may no longer use the models that they train; return the jobs' ids. Call it in every
    transaction that takes away access to a model."""
    lost = [row for row in jobs.list_unfinished(db) if not may_use(db, row.key_id, row.model)]
    return _pause(db, lost, MODEL_WITHDRAWN)


def _pause(db: Database, rows: list[JobRow], why: str) -> list[str]:
    """Pause the jobs that want to run; a running one stops at its next step."""
    paused = [row.id for row in rows if row.wanted == "run"]
    for job_id in paused:
        jobs.set_wanted(db, job_id, "pause")
        jobs.update(db, job_id, reason=why)
        add_message(db, job_id, f"Fine-tuning job paused: {why}", level="warn")
    return paused
