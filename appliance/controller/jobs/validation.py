"""Validates a job between "created" and "queued": copies its data, converts it to chat JSONL and checks it, before any
device is taken.

The job gets its own copy, so deleting the uploaded file later does not stop it. Safe to run again after a crash: the
phase stays "validating" until everything is on disk.
"""

from __future__ import annotations

import asyncio
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
            report, messages = await self._validate(row)
            if self._still_validating(row.id):
                self._queue(row, report, messages)
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

    async def _validate(self, row: JobRow) -> tuple[DataReport, list[tuple[str, str]]]:
        """What is in the training file, and (level, message) of events about the files."""
        context = self._context
        base = base_of(context.db, row)
        if base is None:
            raise _gone(row)
        if method_of(row.method).judged_by == "teacher":
            await self._check_teacher(row, base)
        await settings.check_opening(context, base)
        training = self._file(row.training_file)
        folder = context.jobs_dir / row.id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tokenizer = settings.tokenizer_of(context, base)
        report = await self._convert(row, "training_file", training, folder / "train.jsonl", tokenizer)
        messages = _told(training, report)
        held_out_report = None
        if row.validation_file is not None:
            held_out = self._file(row.validation_file)
            held_out_report = await self._convert(row, "validation_file", held_out, folder / "valid.jsonl", tokenizer)
            messages += _told(held_out, held_out_report)
        valid_path = folder / "valid.jsonl" if held_out_report else None
        compare = partial(data.compare_rows, folder / "train.jsonl", valid_path)
        found = await to_thread.run_sync(compare, limiter=context.file_threads)
        if found.same_files:
            raise TaskFailed("invalid_validation_file", data.SAME_FILES, "validation_file")
        messages += [("warn", text) for text in found.warnings()]
        await self._check_cut(row, base, tokenizer, {"training_file": report, "validation_file": held_out_report})
        return report, messages

    async def _check_teacher(self, row: JobRow, student: Resolved) -> None:
        """Check that the teacher has the student's tokens. Raises TaskFailed."""
        context, judge = self._context, job_records.find_judge(self._context.db, row.id)
        name = judge.judge["teacher"] if judge is not None else ""
        teacher = resolve(context.db, name)
        if teacher is None:
            raise _cannot_teach(row, f"the teacher {name} was deleted")
        ours, theirs = (settings.tokenizer_of(context, one) for one in (student, teacher))
        if ours is None or theirs is None:
            why = "the files of one of them are neither on disk nor in shared memory any more"
        else:
            compare = partial(differ_apart, ours / settings.TOKENIZER, theirs / settings.TOKENIZER)
            why = await to_thread.run_sync(compare, limiter=context.file_threads)
        if why:
            raise _cannot_teach(row, f"{name} cannot teach {student.name}: {why}")

    async def _check_cut(
        self, row: JobRow, base: Resolved, tokenizer: Path | None, reports: dict[str, DataReport | None]
    ) -> None:
        """Refuse, by line, what the ranks would refuse only once they held devices. Raises InvalidData,
        InvalidHyperparameter."""
        context, method, training = self._context, method_of(row.method), reports["training_file"]
        if tokenizer is None or training is None or not method.cut_refuses:
            return
        chosen = settings.choose_on_box(context, base, method, row.hyperparameters, settings.dataset_of(training), row)
        most = method.data_length(chosen.resolved["max_length"], chosen.resolved["options"])
        for param, report in reports.items():
            if report is None or (report.longest_example_tokens <= most and report.n_examples <= COUNTED_EXAMPLES):
                continue
            file = self._file(getattr(row, param))
            cut = await self._check(
                row, file, context.files_dir / file.id, method=method, tokenizer=tokenizer, cut_at=most
            )
            if not cut.ok:
                raise InvalidData(param, file.id, cut, row.id)

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
        source = self._context.files_dir / file.id
        report = await self._check(row, file, source, chat_path=target, method=method, tokenizer=tokenizer)
        if report.ok and (reason := method.refuses(report.shape)) is not None:
            report.add_error(1, reason)
        if not report.ok:
            raise InvalidData(param, file.id, report, row.id)
        return report

    async def _check(self, row: JobRow, file: FileRow, source: Path, **how: Any) -> DataReport:
        """`storage.checked`, which meanwhile reports its progress in the job's events."""
        far = ""

        def heard(examples: int, share: float) -> None:
            nonlocal far
            far = f": {examples:,} examples so far, {100 * share:.0f} % of the file"

        checking = asyncio.ensure_future(storage.checked(self._context, source, heard=heard, **how))
        try:
            while not (await asyncio.wait([checking], timeout=TELL_EVERY_S))[0]:
                if self._still_validating(row.id):
                    add_message(self._context.db, row.id, f"{file.filename} is being checked{far}")
            return checking.result()
        finally:
            checking.cancel()

    def _queue(self, row: JobRow, report: DataReport, messages: list[tuple[str, str]]) -> None:
        """Raises TaskFailed."""
        context, db = self._context, self._context.db
        row, method = jobs.get(db, row.id), method_of(row.method)  # a user may have changed it in the meantime
        base = base_of(context.db, row)
        if base is None:
            raise _gone(row)
        chosen = settings.choose_on_box(context, base, method, row.hyperparameters, settings.dataset_of(report), row)
        # Fixed from here on: otherwise a job that waits would train a version that was made after the request.
        resolved = {**chosen.resolved, "base_version": base.version.version}
        if not chosen.sizes:
            param = "allowed_sizes" if row.asked_sizes else "min_devices"
            raise TaskFailed("invalid_devices", job_devices.no_size(resolved, chosen.by_batch), param)
        verdict = settings.verdict_on_box(context, base, chosen, method)
        if not verdict.fits:
            instead = f" What would fit: {'; '.join(verdict.instead)}." if verdict.instead else ""
            raise TaskFailed("insufficient_memory", " ".join(verdict.problems) + instead)
        # Only sizes whose ranks fit their devices: on fewer devices the job would run out of memory midway.
        dataset = settings.dataset_of(report)
        odd = settings.cut_examples(method, dataset, chosen.resolved)
        odd += settings.high_rate(context, base, method, row.hyperparameters, dataset, chosen.resolved)
        sizes, messages = list(verdict.sizes), [*messages, *(("warn", text) for text in (*verdict.warnings, *odd))]
        with db.transaction():
            for level, text in messages:
                add_message(db, row.id, text, level=level)
            examples = report.n_examples
            add_message(db, row.id, f"Files validated, {examples} training examples, moving job to queued state")
            jobs.update(db, row.id, resolved=resolved, allowed_sizes=sizes)
            jobs.set_phase(db, row.id, "queued", reason="waiting for devices")


def _told(file: FileRow, report: DataReport) -> list[tuple[str, str]]:
    by_level = (("warn", report.warnings), ("info", report.notes))
    return [(level, f"{file.filename}: {text}") for level, texts in by_level for text in texts]


def _unreadable(why: object) -> TaskFailed:
    return TaskFailed("file_unreadable", f"The data of the job could not be read: {why}", "training_file")


def _gone(row: JobRow) -> TaskFailed:
    return _unreadable(f"the model {row.model} was deleted, or is not shared with the job's owner any more")


def _cannot_teach(row: JobRow, why: str) -> TaskFailed:
    return TaskFailed("invalid_teacher", why, f"method.{row.method}.teacher")
