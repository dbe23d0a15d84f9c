"""Validates a job between "created" and "queued": copies its data, converts it to chat JSONL and checks it, before any
device is taken.

The job gets its own copy, so deleting the uploaded file later does not stop it. Safe to run again after a crash: the
phase stays "validating" until everything is on disk.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from appliance.controller.access.model_access import Resolved, base_of
from appliance.controller.access.naming import resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, is_full
from appliance.controller.files import storage
from appliance.controller.jobs import data, settings
from appliance.controller.jobs import devices as job_devices
from appliance.controller.jobs.events import add_message, fail
from appliance.store.objects import files as file_rows
from appliance.store.objects import job_records, jobs
from appliance.store.rows import FileRow, JobEventRow, JobRow, TaskRow
from train.data.check import COUNTED_EXAMPLES, DataReport
from train.data.same_tokens import differ_apart
from train.methods.methods import method_of
from train.plan.errors import InvalidHyperparameter
from weights.checkpoint.errors import CheckpointRefused

TELL_EVERY_S = 30.0
VALIDATIONS = "validations"


class InvalidData(TaskFailed):
    """The data of a job cannot be used for training; `report` says where."""

    def __init__(self, param: str, file_id: str, report: DataReport, job_id: str):
        summary = storage.summary(report, f"/v1/fine_tuning/jobs/{job_id}/errors")
        super().__init__(f"invalid_{param}", f"The file {file_id} has {summary}", param)
        self.report = report


def lines_of(events: Iterable[JobEventRow]) -> tuple[list[tuple[int, str]], int]:
    """The bad examples that this module has written into a job's events, and how many there were."""
    refused = [event.data for event in events if event.data is not None and "of" in event.data]
    return [(data["line"], data["reason"]) for data in refused], refused[-1]["of"] if refused else 0


class JobValidation:
    """Validates jobs as tasks; file work happens on a thread. A job whose key ends is paused, not failed."""

    def __init__(self, context: ControllerContext):
        self._context = context
        context.tasks.add(Kind(VALIDATIONS, self.run, self.fail, at_once=8, per_owner=2))

    async def run(self, task: TaskRow) -> None:
        """Raises TaskFailed."""
        row = jobs.find(self._context.db, task.id)
        if row is None or row.phase != "validating":
            return
        try:
            await self._validate(row)
        except InvalidHyperparameter as error:
            raise TaskFailed("invalid_hyperparameter", str(error), error.param) from error
        except CheckpointRefused as error:
            raise TaskFailed("model_refused", str(error), "model") from error
        except OSError as error:
            if is_full(error):
                raise
            raise _unreadable(error) from error
        self._ended(row.id)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        db = self._context.db
        if self._still_validating(task.id):
            with db.transaction():
                if isinstance(error, InvalidData):
                    for line, reason in error.report.errors:
                        told = {"param": error.param, "line": line, "reason": reason, "of": error.report.n_errors}
                        add_message(db, task.id, f"line {line}: {reason}", level="error", data=told)
                fail(db, task.id, error.code, str(error), error.param)
        self._ended(task.id)

    def _ended(self, job_id: str) -> None:
        if (row := jobs.find(self._context.db, job_id)) is None or row.finished:
            data.remove(self._context, job_id)
        self._context.scheduler.nudge(f"{job_id} was validated")

    def _still_validating(self, job_id: str) -> bool:
        # The job may have been cancelled while the thread read files.
        row = jobs.find(self._context.db, job_id)
        return row is not None and row.phase == "validating"

    async def _validate(self, row: JobRow) -> None:
        """Check everything and queue the job. Raises TaskFailed, InvalidHyperparameter, CheckpointRefused, OSError."""
        context, method = self._context, method_of(row.method)
        base = self._base(row)
        if method.judged_by == "teacher":
            await self._check_teacher(row, base)
        await settings.check_opening(context, base)
        folder, tokenizer = context.jobs_dir / row.id, settings.tokenizer_of(context, base)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        messages: list[tuple[str, str]] = []
        reports: dict[str, DataReport] = {}
        paths = {"training_file": folder / "train.jsonl", "validation_file": folder / "valid.jsonl"}
        for param, path in paths.items():
            if (file_id := getattr(row, param)) is not None:
                file = self._file(file_id)
                report = reports[param] = await self._convert(row, param, file, path, tokenizer)
                for level, texts in (("warn", report.warnings), ("info", report.notes)):
                    messages += [(level, f"{file.filename}: {text}") for text in texts]
        if "validation_file" in reports:
            compare = partial(data.compare_rows, *paths.values())
            are_same, warnings = await to_thread.run_sync(compare, limiter=context.file_threads)
            if are_same:
                raise TaskFailed("invalid_validation_file", data.SAME_FILES, "validation_file")
            messages += [("warn", text) for text in warnings]
        dataset = settings.dataset_of(reports["training_file"])
        chosen = settings.choose_on_box(context, base, method, row.hyperparameters, dataset, row)
        if tokenizer is not None and method.cut_refuses:
            most = method.data_length(chosen.resolved["max_length"], chosen.resolved["options"])
            await self._check_cut(row, tokenizer, most, reports)
        if self._still_validating(row.id):
            self._queue(row.id, reports["training_file"], messages)

    async def _check_teacher(self, row: JobRow, student: Resolved) -> None:
        """Check that the teacher has the student's tokens. Raises TaskFailed."""
        context, judge = self._context, job_records.find_judge(self._context.db, row.id)
        name = judge.judge["teacher"] if judge is not None else ""
        teacher = resolve(context.db, name)
        ours, theirs = (settings.tokenizer_of(context, one) if one else None for one in (student, teacher))
        if teacher is None:
            why = f"the teacher {name} was deleted"
        elif ours is None or theirs is None:
            why = f"the files of {name} or {student.name} are neither on disk nor in shared memory any more"
        else:
            compare = partial(differ_apart, ours / settings.TOKENIZER, theirs / settings.TOKENIZER)
            why = await to_thread.run_sync(compare, limiter=context.file_threads)
            why = why and f"{name} cannot teach {student.name}: {why}"
        if why:
            raise TaskFailed("invalid_teacher", why, f"method.{row.method}.teacher")

    async def _check_cut(self, row: JobRow, tokenizer: Path, most: int, reports: dict[str, DataReport]) -> None:
        """Refuse, by line, what ranks would refuse only once they held devices. most: tokens. Raises InvalidData."""
        for param, report in reports.items():
            if report.longest_example_tokens <= most and report.n_examples <= COUNTED_EXAMPLES:
                continue
            file = self._file(getattr(row, param))
            cut = await self._check(row, file, method=method_of(row.method), tokenizer=tokenizer, cut_at=most)
            if not cut.ok:
                raise InvalidData(param, file.id, cut, row.id)

    def _base(self, row: JobRow) -> Resolved:
        """Raises TaskFailed."""
        base = base_of(self._context.db, row)
        if base is None:
            why = f"the model {row.model} was deleted, or is not shared with the job's owner any more"
            raise _unreadable(why)
        return base

    def _file(self, file_id: str) -> FileRow:
        # Ignores the expiry: a file that was valid when the job was created stays valid while its bytes are here.
        row = file_rows.find(self._context.db, file_id, viewer=None, now_s=0)
        if row is None:
            raise _unreadable(f"the file {file_id} was deleted")
        return row

    async def _convert(
        self, row: JobRow, param: str, file: FileRow, target: Path, tokenizer: Path | None
    ) -> DataReport:
        method = method_of(row.method)
        report = await self._check(row, file, chat_path=target, method=method, tokenizer=tokenizer)
        if report.ok and (reason := method.refuses(report.shape)) is not None:
            report.add_error(1, reason)
        if not report.ok:
            raise InvalidData(param, file.id, report, row.id)
        return report

    async def _check(self, row: JobRow, file: FileRow, **how: Any) -> DataReport:
        """`storage.checked`, which meanwhile reports its progress in the job's events."""
        far, abandoned = "", threading.Event()

        def heard(examples: int, share: float) -> None:
            nonlocal far
            if abandoned.is_set():  # nothing else ends the thread
                raise InterruptedError
            far = f": {examples:,} examples so far, {100 * share:.0f} % of the file"

        source = self._context.files_dir / file.id
        checking = asyncio.ensure_future(storage.checked(self._context, source, heard=heard, **how))
        try:
            while not (await asyncio.wait([checking], timeout=TELL_EVERY_S))[0]:
                if self._still_validating(row.id):
                    add_message(self._context.db, row.id, f"{file.filename} is being checked{far}")
            return checking.result()
        finally:
            abandoned.set()
            checking.cancel()

    def _queue(self, job_id: str, report: DataReport, messages: list[tuple[str, str]]) -> None:
        """Raises TaskFailed, InvalidHyperparameter, CheckpointRefused."""
        context, db = self._context, self._context.db
        row = jobs.get(db, job_id)  # an operator may have changed it during the check
        base, method, dataset = self._base(row), method_of(row.method), settings.dataset_of(report)
        chosen = settings.choose_on_box(context, base, method, row.hyperparameters, dataset, row)
        # Fixed from here on: otherwise a job that waits would train a version that was made after the request.
        resolved = {**chosen.resolved, "base_version": base.version.version}
        if not chosen.sizes:
            param = "allowed_sizes" if row.asked_sizes else "min_devices"
            raise TaskFailed("invalid_devices", job_devices.no_size(resolved, chosen.by_batch), param)
        verdict = settings.verdict_on_box(context, base, chosen, method)
        if not verdict.fits:
            instead = f" What would fit: {'; '.join(verdict.instead)}." if verdict.instead else ""
            raise TaskFailed("insufficient_memory", " ".join(verdict.problems) + instead)
        warnings = [*verdict.warnings, *settings.cut_examples(method, dataset, chosen.resolved)]
        warnings += settings.high_rate(context, base, method, row.hyperparameters, dataset, chosen.resolved)
        with db.transaction():
            for level, text in [*messages, *(("warn", text) for text in warnings)]:
                add_message(db, row.id, text, level=level)
            examples = report.n_examples
            add_message(db, row.id, f"Files validated, {examples} training examples, moving job to queued state")
            # Only sizes whose ranks fit their devices: on fewer devices the job would run out of memory midway.
            jobs.update(db, row.id, resolved=resolved, allowed_sizes=list(verdict.sizes))
            jobs.set_phase(db, row.id, "queued", reason="waiting for devices")


def _unreadable(why: object) -> TaskFailed:
    return TaskFailed("file_unreadable", f"The data of the job could not be read: {why}", "training_file")
