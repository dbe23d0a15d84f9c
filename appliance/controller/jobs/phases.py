"""The phases of a job around its training: its validation, before it takes any device; and requests to cancel, pause or
resume it, which the scheduler carries out. A job whose key loses its rights is paused.

A validated job gets its own copy of its data, as chat JSONL, so deleting the uploaded file later does not stop it.
Validation is safe to run again after a crash: the phase stays "validating" until everything is on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from anyio import to_thread

from appliance.controller.access.model_access import (
    Resolved,
    base_of,
    caller_may_use,
    may_use,
    resolve,
    unknown_model,
)
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, is_full
from appliance.controller.files import storage
from appliance.controller.http.resource import Resource
from appliance.controller.interfaces.errors import BadRequest, Conflict
from appliance.controller.interfaces.principal import FINE_TUNING, Principal
from appliance.controller.jobs import settings
from appliance.controller.jobs.events import add_message, fail
from appliance.store import files, jobs, keys
from appliance.store.database import Database, IllegalTransition
from appliance.store.rows import FileRow, JobEventRow, JobRow, JobWanted, TaskRow
from train.data_checks.check import DataReport
from train.data_checks.process import TOKENS, differ
from train.methods.methods import method_of
from train.plan.errors import InvalidHyperparameter

# --- validation

VALIDATIONS = "validations"
_COPIES = {"training_file": "train.jsonl", "validation_file": "valid.jsonl"}
MOST_ROWS = 1_000_000
"""Rows of a file that are compared, the first ones: their hashes take some 100 MB."""
SHARED_SHARE = 0.1
"""The share of validation rows that are training rows too, from which a warning is given."""


class InvalidData(TaskFailed):
    """The data of a job cannot be used for training; `report` says where."""

    def __init__(self, param: str, file_id: str, report: DataReport, job_id: str):
        summary = storage.summary(report, f"/v1/fine_tuning/jobs/{job_id}/errors")
        super().__init__(f"invalid_{param}", f"The file {file_id} has {summary}", param)
        self.report = report


def lines_of(events: Iterable[JobEventRow]) -> tuple[list[tuple[int, str]], int]:
    """The bad examples in a job's events, as `JobValidation.fail` writes them, and how many there were."""
    bad = [event.data for event in events if event.data is not None and "of" in event.data]
    return [(data["line"], data["reason"]) for data in bad], bad[-1]["of"] if bad else 0


def remove_copies(context: ControllerContext, job_id: str) -> None:
    """Delete the data of a job that has ended: nothing reads it any more."""
    for name in _COPIES.values():
        (context.jobs_dir / job_id / name).unlink(missing_ok=True)
    shutil.rmtree(context.jobs_dir / job_id / TOKENS, ignore_errors=True)


class JobValidation:
    """Validates jobs as tasks; file work happens on a thread. A job whose key ends is paused, not failed."""

    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db
        context.tasks.add(Kind(VALIDATIONS, self.run, self.fail, at_once=8, per_owner=2))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = self._validating(task.id)
        if row is None:
            return
        try:
            await self._validate(row)
        except InvalidHyperparameter as error:
            raise TaskFailed("invalid_hyperparameter", str(error), error.param) from error
        except BadRequest as error:
            raise TaskFailed(error.code or "", error.message, error.param) from error
        except OSError as error:
            if is_full(error):
                raise
            raise _unreadable(error) from error
        self._ended(row.id)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        if self._validating(task.id) is not None:
            with self._db.transaction():
                if isinstance(error, InvalidData):
                    for line, reason in error.report.errors:
                        data = {"param": error.param, "line": line, "reason": reason, "of": error.report.n_errors}
                        add_message(self._db, task.id, f"line {line}: {reason}", level="error", data=data)
                fail(self._db, task.id, error.code, str(error), error.param)
        self._ended(task.id)

    def _ended(self, job_id: str) -> None:
        if (row := jobs.find(self._db, job_id)) is None or row.finished:
            remove_copies(self._context, job_id)
        self._context.scheduler.nudge(f"{job_id} was validated")

    def _validating(self, job_id: str) -> JobRow | None:
        """The job as it is now, unless it was cancelled meanwhile."""
        row = jobs.find(self._db, job_id)
        return row if row is not None and row.phase == "validating" else None

    async def _validate(self, row: JobRow) -> None:
        """Check everything and queue the job. Raises TaskFailed, InvalidHyperparameter, BadRequest, OSError."""
        context, method = self._context, method_of(row.method)
        base = base_of(self._db, row)
        if base is None:
            raise _unreadable(f"the model {row.model} was deleted, or is not shared with the job's owner any more")
        if method.judged_by == "teacher":
            await self._check_teacher(row, base)
        folder, tokenizer = context.jobs_dir / row.id, settings.tokenizer_of(context, base)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        messages, reports = list[tuple[str, str]](), dict[str, DataReport]()
        paths = {param: folder / name for param, name in _COPIES.items() if getattr(row, param) is not None}
        for param, path in paths.items():
            file = self._file(getattr(row, param))
            source = context.files_dir / file.id
            report = await storage.checked(context, source, chat_path=path, method=method, tokenizer=tokenizer)
            if not report.ok:
                raise InvalidData(param, file.id, report, row.id)
            reports[param] = report
            for level, texts in (("warn", report.warnings), ("info", report.notes)):
                messages += [(level, f"{file.filename}: {text}") for text in texts]
        if "validation_file" in paths:
            compare = partial(_compare_rows, *paths.values())
            messages += await to_thread.run_sync(compare, limiter=context.file_threads)
        dataset = settings.dataset_of(reports["training_file"])
        bounds = settings.DeviceBounds(row.min_devices, row.max_devices)
        request = settings.SettingsRequest(context, base, method, row.hyperparameters, dataset, bounds)
        if tokenizer is not None and method.cut_refuses:
            fields = request.resolve()
            await self._check_cut(row, tokenizer, method.data_length(fields["max_length"], fields["options"]), reports)
        if (now := self._validating(row.id)) is None:
            return
        # Of the row as it is now: an operator may have changed it during the check.
        chosen = replace(request, bounds=settings.DeviceBounds(now.min_devices, now.max_devices)).choose()
        # Fixed from here on: otherwise a job that waits would train a version that was made after the request.
        resolved = {**chosen.resolved, "base_version": base.version.version}
        if not (verdict := chosen.verdict).fits:
            instead = f" What would fit: {'; '.join(verdict.instead)}." if verdict.instead else ""
            raise TaskFailed("insufficient_memory", " ".join(verdict.problems) + instead)
        warnings = (*verdict.warnings, *settings.cut_warning(method, dataset, resolved))
        messages += [("warn", text) for text in warnings]
        count = reports["training_file"].n_examples
        messages.append(("info", f"Files validated, {count} training examples, moving job to queued state"))
        with self._db.transaction():
            for level, text in messages:
                add_message(self._db, row.id, text, level=level)
            # Only sizes whose ranks fit their devices: on fewer devices the job would run out of memory midway.
            estimate = next(iter(chosen.layouts), {}) | {"memory": verdict.memory()}
            jobs.update(self._db, row.id, resolved=resolved, allowed_sizes=list(verdict.sizes), estimate=estimate)
            jobs.set_phase(self._db, row.id, "queued", reason="waiting for devices")

    async def _check_teacher(self, row: JobRow, student: Resolved) -> None:
        """Check that the teacher has the student's tokens. Raises TaskFailed."""
        context, judge = self._context, jobs.find_judge(self._db, row.id)
        name = judge.judge["teacher"] if judge is not None else ""
        teacher = resolve(self._db, name)
        ours = settings.tokenizer_of(context, student)
        theirs = settings.tokenizer_of(context, teacher) if teacher is not None else None
        if teacher is None:
            why = f"the teacher {name} was deleted"
        elif ours is None or theirs is None:
            why = f"the files of {name} or {student.name} are neither on disk nor in shared memory any more"
        else:
            compare = partial(differ, ours / settings.TOKENIZER, theirs / settings.TOKENIZER)
            why = await to_thread.run_sync(compare, limiter=context.file_threads)
            why = why and f"{name} cannot teach {student.name}: {why}"
        if why:
            raise TaskFailed("invalid_teacher", why, f"method.{row.method}.teacher")

    async def _check_cut(self, row: JobRow, tokenizer: Path, most: int, reports: dict[str, DataReport]) -> None:
        """Refuse, by line, what ranks would refuse only once they held devices. most: tokens. Raises InvalidData."""
        for param, report in reports.items():
            if report.longest_example_tokens <= most:
                continue
            context, file_id = self._context, self._file(getattr(row, param)).id
            how = {"method": method_of(row.method), "tokenizer": tokenizer, "cut_at": most}
            cut = await storage.checked(context, context.files_dir / file_id, **how)
            if not cut.ok:
                raise InvalidData(param, file_id, cut, row.id)

    def _file(self, file_id: str) -> FileRow:
        # Ignores the expiry: a file that was valid when the job was created stays valid while its bytes are here.
        row = files.find(self._db, file_id, viewer=None, now_s=0)
        if row is None:
            raise _unreadable(f"the file {file_id} was deleted")
        return row


def _compare_rows(training: Path, validation: Path) -> list[tuple[str, str]]:
    """A warning if both files share many rows. Raises TaskFailed if they have the same, OSError."""
    trained, held_out = set(_hashes(training)), set(_hashes(validation))
    if held_out == trained:
        raise TaskFailed(
            "invalid_validation_file",
            "The validation file has the same examples as the training file, so its loss would only repeat the "
            "training loss. Give examples that are not trained on, or no validation_file.",
            "validation_file",
        )
    shared = len(held_out & trained)
    if not shared or shared < SHARED_SHARE * len(held_out):
        return []
    text = (
        f"{shared:,} of the {len(held_out):,} validation examples are training examples too: the validation loss looks "
        "better than it is. Keep them in one of the files."
    )
    return [("warn", text)]


def _hashes(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in islice(file, MOST_ROWS):
            yield blake2b(line, digest_size=8).digest()


def _unreadable(why: object) -> TaskFailed:
    return TaskFailed("file_unreadable", f"The data of the job could not be read: {why}", "training_file")


# --- cancel, pause, resume

JOBS = Resource(
    "job",
    "/v1/fine_tuning/jobs",
    (FINE_TUNING,),
    jobs.find_visible,
    missing="Could not find fine tune: {}",
    param="fine_tune_id",
    code="fine_tune_not_found",
    fields=("status", "model", "training_file", "validation_file"),
)
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
        raise Conflict(
            f"The fine-tuning job {job_id} is {error.found}; it cannot be asked to {verb} any more.",
            param="fine_tune_id",
            code="invalid_job_state",
        ) from error
    if wanted == "cancel":
        context.tasks.restart(VALIDATIONS, job_id)  # frees its slot
    context.scheduler.nudge(f"{verb} of {job_id}")
    return after


def max_priority(db: Database, caller: Principal) -> int:
    """The highest priority that the jobs of the caller's key may have; 0 for a caller without a key."""
    key = keys.find(db, caller.key_id) if caller.key_id else None
    return 0 if key is None else key.max_priority


def _taken_over(db: Database, row: JobRow, caller: Principal) -> JobRow:
    """The job as the caller resumes it. One whose key was revoked becomes a job of the caller's key, and loses what
    that key may not claim; not if an admin resumes it. Raises NotFound once the caller's or the job's key may not use
    the model that the job trains."""
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
    """The reason to show in place of the planner's; None: show the planner's."""
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
    """Pause the jobs whose keys may not use the models that they train any more; returns their ids. Call it in every
    transaction that takes access to a model away: a waiting job would fail at its start, and a running one would go on
    learning from a model that its owner may not see."""
    lost = [row for row in jobs.list_unfinished(db) if not may_use(db, row.key_id, row.model)]
    return _pause(db, lost, MODEL_WITHDRAWN)


def _pause(db: Database, rows: list[JobRow], why: str) -> list[str]:
    """Running ones stop at their next step, as after any pause."""
    paused = [row.id for row in rows if row.wanted == "run"]
    for job_id in paused:
        jobs.set_wanted(db, job_id, "pause")
        jobs.update(db, job_id, reason=why)
        add_message(db, job_id, f"Fine-tuning job paused: {why}", level="warn")
    return paused
