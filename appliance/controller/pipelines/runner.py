"""Carries out runs of pipelines and begins those that are due: it looks every second.

What must outlive the controller is in the rows. A step is done once its result is in the row: a file is written in one
transaction with the run's `file_id`, a job with its `job_id`. So a controller that was killed in between repeats the
step, and never makes a second file or job.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.one_each import OneEach
from appliance.controller.data_checks.carry_out import check_file, prepared_files
from appliance.controller.data_checks.data_work import DataWork
from appliance.controller.data_checks.requests import CheckRequest, PrepareRequest
from appliance.controller.files import storage
from appliance.controller.gates.runner import GateRunner
from appliance.controller.interfaces.config import Bucket
from appliance.controller.interfaces.errors import ApiError, BadRequest, Conflict
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.validation import JobValidation
from appliance.controller.jobs.wanted import ask
from appliance.controller.openai.new_job import insert_job
from appliance.controller.pipelines import bucket, new_data
from appliance.controller.pipelines.new_data import Found, NoData
from appliance.controller.pipelines.spec import Check, Data, PipelineSpec, Prepare, Schedule, job_of
from appliance.controller.pipelines.steps import End, Seen, beyond, end_of, steps_of
from appliance.store.database import BOX
from appliance.store.ids import new_id
from appliance.store.objects import files, gates, jobs, models, pipelines
from appliance.store.records import keys
from appliance.store.rows import FileRow, PipelineRow, PipelineRunRow
from scheduler.loop.mode_schedule import next_firing_s
from weights.format.errors import TierUnavailable

LOOK_EVERY_S = 1.0
_BAD_LINES_SHOWN = 3
AGAIN_S, LONGEST_S = 60.0, 3600.0
"""A bucket that cannot be read is tried again after AGAIN_S, and given up LONGEST_S after the run began."""


class _Failed(Exception):
    pass


class PipelineRunner:
    def __init__(self, context: ControllerContext, data_work: DataWork, validation: JobValidation, judging: GateRunner):
        self._context, self._db = context, context.db
        self._data_work, self._validation, self._judging = data_work, validation, judging
        self._at_data: dict[str, asyncio.Task[None]] = {}
        """The task of a run that reads a bucket, checks or prepares data. It ends with the run."""
        self._not_before_s: dict[str, float] = {}
        """When a run that waits for a bucket tries again, on the monotonic clock."""
        self._going = OneEach(context.background, "pipeline")  # runs, and pipelines that are due
        self.tasks = self._going.tasks

    async def look(self) -> None:
        """One round: starts a task for each run that is not over and for each pipeline that is due."""
        for pipeline_id in pipelines.due(self._db, time.time()):
            await self._going.begin(pipeline_id, partial(self._when_due, pipeline_id))
        for run_id in pipelines.running(self._db):
            await self._going.begin(run_id, partial(self._advance, run_id))

    # --- when it is time

    def schedule(self, row: PipelineRow, on: bool) -> None:
        """Raises Conflict for a pipeline that has no schedule."""
        spec = PipelineSpec.model_validate(row.spec)
        if on and spec.schedule is None:
            raise Conflict(f"{row.name} has no 'schedule' in it.", param="schedule", code="no_schedule")
        next_s = _next_s(spec.schedule, time.time(), at_once=True) if on and spec.schedule is not None else None
        pipelines.update(self._db, row.id, scheduled=int(on), next_s=next_s, note="")

    async def _when_due(self, pipeline_id: str) -> None:
        row = pipelines.find(self._db, pipeline_id)
        if row is None or not row.scheduled:
            return
        spec = PipelineSpec.model_validate(row.spec)
        assert spec.schedule is not None
        note = ""
        going = pipelines.running_of(self._db, row.id)
        if how := keys.how_ended(self._db, row.key_id):
            pipelines.update(self._db, row.id, scheduled=0, next_s=None, note=f"the key that scheduled it {how}")
            return
        if going is not None:
            note = f"{going.id} still goes on" if spec.schedule.cron is not None else ""
        elif spec.schedule.cron is not None:
            self.begin(row, "clock")
        else:
            note = await self._begin_if_new(row, spec)
        next_s = _next_s(spec.schedule, time.time())
        if self._is_due_still(row):
            pipelines.update(self._db, row.id, next_s=next_s, note=note)

    def _is_due_still(self, row: PipelineRow) -> bool:
        """Whether the pipeline is unchanged since it was due. Reading a bucket takes time, in which a user may delete
        it, change it, switch it off, or take it over with another key."""
        now = pipelines.find(self._db, row.id)
        return now is not None and bool(now.scheduled) and (now.spec, now.key_id) == (row.spec, row.key_id)

    async def _begin_if_new(self, row: PipelineRow, spec: PipelineSpec) -> str:
        """Begins a run if there is new data. Returns why it did not; "" if it did, or if there is nothing new."""
        try:
            found = new_data.new(await self._found(row, spec), await self._taken(row), spec.data)
        except (NoData, TierUnavailable) as error:
            return str(error)
        sha256 = await asyncio.to_thread(pipelines.sha256_of, found)
        if not found or not self._is_due_still(row) or pipelines.running_of(self._db, row.id) is not None:
            return ""
        last = pipelines.last_of(self._db, row.id)
        if last is not None and last.state != "succeeded" and last.data_sha256 == sha256:
            return f"{last.id} has {last.state} on this data; it is tried again once there is other data"
        self.begin(row, "data")
        return ""

    def begin(self, row: PipelineRow, trigger: Literal["request", "clock", "data"]) -> PipelineRunRow:
        """Raises Conflict while another of its runs goes on."""
        going = pipelines.running_of(self._db, row.id)
        if going is not None:
            raise Conflict(f"{going.id} of {row.name} goes on.", param="name", code="pipeline_running")
        run = PipelineRunRow(
            new_id("piperun_"),
            row.id,
            time.time(),
            trigger,
            key_id=row.key_id,
            owner=row.owner,
            spec=row.spec,
            reason="it looks for data",
        )
        run = replace(run, steps=steps_of(PipelineSpec.model_validate(row.spec), run, Seen(), run.created_s))
        with self._db.transaction():
            pipelines.insert_run(self._db, run)
            record(
                self._context, caller_of(self._db, row.key_id), "pipeline.run", row.name, run=run.id, trigger=trigger
            )
        return run

    # --- a run

    async def _advance(self, run_id: str) -> None:
        run = pipelines.find_run(self._db, run_id)
        row = pipelines.find(self._db, run.pipeline_id) if run is not None else None
        if run is None or row is None or run.state != "running":
            return
        if time.monotonic() < self._not_before_s.get(run_id, 0.0):
            return
        self._not_before_s.pop(run_id, None)
        spec, caller = PipelineSpec.model_validate(run.spec), caller_of(self._db, run.key_id)
        try:
            if how := keys.how_ended(self._db, run.key_id):
                raise _Failed(f"the key of this run {how}")
            if run.file_id is None:
                await self._take_data(run, row, spec, caller)
            elif run.job_id is None:
                await self._ready(run, row, spec, caller)
            else:
                self._follow(run, row, spec)
        except (_Failed, NoData) as error:
            self._end(run_id, row, End(True, str(error)))
        except bucket.Changed as error:
            pipelines.choose(self._db, run_id, {})
            self._wait(run, row, str(error))
        except TierUnavailable as error:
            self._wait(run, row, str(error))
        except ApiError as error:
            if error.passes:
                self._says(run_id, error.message)
            else:
                self._end(run_id, row, End(True, error.message))
        except OSError as error:
            self._end(run_id, row, End(True, f"the data could not be read: {error.strerror or type(error).__name__}"))

    def _wait(self, run: PipelineRunRow, row: PipelineRow, why: str) -> None:
        """Try again later: a network that is away for a while costs the run nothing that it has done."""
        if time.time() - run.created_s > LONGEST_S:
            self._end(run.id, row, End(True, why))
            return
        self._not_before_s[run.id] = time.monotonic() + AGAIN_S
        self._says(run.id, f"{why}; tried again every {AGAIN_S:.0f} s")

    async def _found(self, row: PipelineRow, spec: PipelineSpec) -> Found:
        """Raises NoData, TierUnavailable."""
        data = spec.data
        _check_may_read(data, caller_of(self._db, row.key_id))
        if data.bucket is not None:
            return await asyncio.to_thread(bucket.found_in, self._bucket(data.bucket), data.pattern)
        if data.folder is not None:
            return await asyncio.to_thread(new_data.in_folder, data.folder, data.pattern, time.time())
        if data.uploads is not None:
            return await self._db.read(row.owner or BOX, new_data.uploaded, self._context, data.uploads, row.owner)
        file = files.find(self._db, data.file or "", viewer=None, now_s=time.time())
        if file is None:
            raise NoData(f"the file {data.file} was deleted")
        return {file.id: [file.bytes, file.filename]}

    def _bucket(self, name: str) -> Bucket:
        """Raises NoData."""
        if (found := self._context.config.buckets.get(name)) is None:
            raise NoData(f"the box's configuration has no bucket {name} any more")
        return found

    async def _taken(self, row: PipelineRow) -> Found:
        """The files that earlier runs have taken. Only a run changes them, and a pipeline has one run at a time."""
        return await self._db.read(row.owner or BOX, pipelines.taken, self._db, row.id)

    async def _take_data(self, run: PipelineRunRow, row: PipelineRow, spec: PipelineSpec, caller: Principal) -> None:
        """Choose the data, then make one file of it; each result is stored before the next step begins."""
        if not run.data_files:
            found, taken = await self._found(row, spec), await self._taken(row)
            chosen = found if spec.data.file is not None else new_data.new(found, taken, spec.data)
            if not chosen:
                self._end(run.id, row, End(False, "there is no new data; nothing was trained", "nothing_new"))
                return
            with self._db.transaction():
                if not self._update_going(run.id, reason=f"{len(chosen)} files are read"):
                    return
                pipelines.take(self._db, row.id, {name: state for name, state in taken.items() if name in found})
                pipelines.choose(self._db, run.id, chosen)
            run = pipelines.find_run(self._db, run.id) or run
        if not spec.data.elsewhere and run.data_files == 1:
            self._update_going(run.id, file_id=next(iter(pipelines.chosen(self._db, run.id))), reason="")
            return
        await self._till_cancelled(run.id, self._joined(run, spec, caller))

    async def _joined(self, run: PipelineRunRow, spec: PipelineSpec, caller: Principal) -> None:
        """Raises ApiError, NoData, OSError, TierUnavailable, Changed."""
        _check_may_read(spec.data, caller)
        context, file_id, size = self._context, new_id("file-"), run.data_bytes
        if size > context.config.upload_total_bytes:
            raise NoData(f"the data has {size} bytes; a file has {context.config.upload_total_bytes} at most")
        base = None if spec.data.folder is not None else context.files_dir
        with context.quotas.receiving(caller) as took, storage.growing(context, file_id) as (incoming,):
            took(size + run.data_files)
            # Only here, because a run that waits for room comes by every second.
            chosen = await self._db.read(run.owner or BOX, pipelines.chosen, self._db, run.id)
            room = context.quotas.disk.check
            if spec.data.bucket is not None:
                sha256 = await bucket.join_chosen(self._bucket(spec.data.bucket), chosen, incoming, room)
            else:
                sha256 = await context.file_work.run(run.owner, new_data.join_chosen, chosen, base, incoming, room)
            made = await storage.described(
                context, file_id, incoming, filename=f"{run.id}.jsonl", sha256=sha256, caller=caller
            )
            with storage.with_row(context, file_id):
                if self._update_going(run.id, file_id=file_id, reason=""):
                    storage.keep(context, made, incoming)

    async def _ready(self, run: PipelineRunRow, row: PipelineRow, spec: PipelineSpec, caller: Principal) -> None:
        """Take the next step: check the data, prepare it, or submit the job. Raises ApiError, OSError, _Failed."""
        file = files.find(self._db, run.file_id or "", viewer=caller.viewer, now_s=time.time())
        if file is None:
            raise _Failed(f"the file {run.file_id} was deleted")
        if spec.check is not False and file.status == "error" and (spec.prepare is None or not spec.prepare.drop):
            if spec.data.elsewhere or run.data_files > 1:
                # The joined file goes with the run: its lines and its address help nobody.
                file = replace(file, status_details=await self._where_bad(run, spec, file))
            self._tell(run, spec, Seen(file))
            raise _Failed(f"the data was refused: {file.status_details}")
        if isinstance(spec.check, Check) and "checked" not in run.made:
            await self._till_cancelled(run.id, self._check(run, file, spec.check, caller))
        elif spec.prepare is not None and "prepared" not in run.made:
            await self._till_cancelled(run.id, self._prepare(run, file, spec.prepare, caller))
        else:
            self._train(run, row, spec, file, caller)

    async def _where_bad(self, run: PipelineRunRow, spec: PipelineSpec, file: FileRow) -> str:
        """What is wrong with a joined file, by the files that it was joined from and their lines. Raises OSError."""
        report = file.report or {}
        errors = [(int(line), str(reason)) for line, reason in report.get("errors", ())][:_BAD_LINES_SHOWN]
        chosen = await self._db.read(run.owner or BOX, pipelines.chosen, self._db, run.id)
        joined, lines = self._context.files_dir / file.id, [line for line, _ in errors]
        found = await self._context.file_work.run(run.owner, new_data.places, joined, chosen, lines)
        places = []
        for line, reason in errors:
            name, at = found.get(line, ("", line))
            if spec.data.folder is not None and name:
                name = os.path.relpath(name, spec.data.folder)
            elif spec.data.bucket is None and (row := files.find(self._db, name, viewer=None, now_s=0)) is not None:
                name = row.filename
            places.append(f"{name + ', ' if name else ''}line {at}: {reason}")
        n_errors = report.get("n_errors", len(errors))
        more = f"; and {n_errors - len(places)} more" if n_errors > len(places) else ""
        return f"{n_errors} bad example(s): {'; '.join(places)}{more}"

    async def _till_cancelled(self, run_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._at_data[run_id] = asyncio.create_task(work)
        try:
            await self._at_data[run_id]
        finally:
            del self._at_data[run_id]

    async def _check(self, run: PipelineRunRow, file: FileRow, step: Check, caller: Principal) -> None:
        """Raises ApiError, _Failed."""
        body = CheckRequest(**step.model_dump(exclude={"at_most"}, exclude_none=True))
        report = await check_file(self._context, self._data_work, file, body, caller)
        found, more = {name: int(one["count"]) for name, one in report["checks"].items()}, beyond(step, report)
        self._update_going(run.id, made={**run.made, "checked": found, "beyond": more}, reason="")
        if more:
            raise _Failed(f"the data has {'; '.join(more)}")

    async def _prepare(self, run: PipelineRunRow, file: FileRow, step: Prepare, caller: Principal) -> None:
        """Raises ApiError, OSError."""
        body = PrepareRequest(**step.model_dump(exclude_none=True))
        file_ids = {kind: new_id("file-") for kind in ("prepared", "validation")[: 1 if step.split is None else 2]}
        ids = list(file_ids.values())
        async with prepared_files(self._context, self._data_work, body, [file], ids, caller) as made:
            with storage.with_row(self._context, *ids):
                made_now = {**run.made, **file_ids, "dropped": made.lineage["dropped"]}
                if self._update_going(run.id, made=made_now, reason=""):
                    made.keep(self._context)

    def _train(
        self, run: PipelineRunRow, row: PipelineRow, spec: PipelineSpec, file: FileRow, caller: Principal
    ) -> None:
        """Raises ApiError, _Failed."""
        try:
            body = job_of(spec, run.made.get("prepared", file.id), run.made.get("validation"))
            with self._db.transaction():
                job = insert_job(self._context, body, caller)
                pipelines.update_run(self._db, run.id, job_id=job.id, reason="")
        except BadRequest as error:
            if error.param == "training_file" or error.param == "validation_file" and "validation" in run.made:
                raise  # the run's own, of which the file of the pipeline says nothing
            # The box may have become stricter since the file was stored.
            raise _Failed(
                f"the job was refused: {error.message} Change 'train' in the file of the pipeline {row.name} and put "
                "it again"
            ) from None
        self._validation.start(job.id)
        self._tell(replace(run, job_id=job.id), spec, Seen(file, job, gates.of_job(self._db, job.id)))

    def _follow(self, run: PipelineRunRow, row: PipelineRow, spec: PipelineSpec) -> None:
        seen = self._seen(run)
        self._tell(run, spec, seen)
        if (end := end_of(spec, seen)) is not None:
            self._end(run.id, row, end)

    def _seen(self, run: PipelineRunRow) -> Seen:
        job = jobs.find(self._db, run.job_id) if run.job_id is not None else None
        gate = gates.of_job(self._db, job.id) if job is not None else None
        model = models.find(self._db, job.output_model) if job is not None else None
        active = (
            models.find_version(self._db, model.id, model.active_version) if model and model.active_version else None
        )
        answers = active is not None and job is not None and active.meta.get("job_id") == job.id
        file = files.find(self._db, run.file_id, viewer=None, now_s=0) if run.file_id is not None else None
        return Seen(file, job, gate, answers)

    def _tell(self, run: PipelineRunRow, spec: PipelineSpec, seen: Seen) -> None:
        """Store how far the run is, if that has changed."""
        steps = steps_of(spec, run, seen, time.time())
        now = next((one for one in steps if one["state"] == "running"), None)
        reason = f"{now['name']}: {now['says']}" if now is not None else run.reason
        if (steps, reason) != (run.steps, run.reason):
            pipelines.update_run(self._db, run.id, steps=steps, reason=reason)

    def _says(self, run_id: str, reason: str) -> None:
        self._update_going(run_id, reason=reason)

    def _update_going(self, run_id: str, **changes: Any) -> bool:
        """Returns False if the run has ended meanwhile."""
        run = pipelines.find_run(self._db, run_id)
        if run is None or run.state != "running":
            return False
        run = replace(run, **changes)
        spec = PipelineSpec.model_validate(run.spec)
        steps = steps_of(spec, run, self._seen(run), time.time())
        pipelines.update_run(self._db, run_id, **changes, steps=steps)
        return True

    # --- ends

    def cancel(self, run_id: str) -> None:
        """Cancel the run with its job and its gate. Idempotent. A canary that runs goes on."""
        run = pipelines.find_run(self._db, run_id)
        row = pipelines.find(self._db, run.pipeline_id) if run is not None else None
        if run is None or row is None or run.state != "running":
            return
        caller = caller_of(self._db, run.key_id)
        if run.job_id is not None:
            job, gate = jobs.find(self._db, run.job_id), gates.of_job(self._db, run.job_id)
            if job is not None and not job.finished:
                ask(self._context, job.id, "cancel", caller)
            if gate is not None and gate.state not in ("canary", "ended"):
                self._judging.cancel(gate.id)
        self._end(run_id, row, End(True, "cancelled by request"), cancelled=True)
        if run_id in self._at_data:
            self._at_data[run_id].cancel()

    def _end(self, run_id: str, row: PipelineRow, end: End, *, cancelled: bool = False) -> None:
        run = pipelines.find_run(self._db, run_id)
        if run is None or run.state != "running":
            return
        self._not_before_s.pop(run_id, None)
        state = "cancelled" if cancelled else "failed" if end.failed else "succeeded"
        steps = [_ended(one, end, cancelled) for one in run.steps]
        with self._db.transaction():
            pipelines.update_run(
                self._db,
                run_id,
                state=state,
                outcome=end.outcome,
                reason=end.reason,
                steps=steps,
                ended_s=time.time(),
            )
            now = pipelines.find(self._db, row.id)
            if now is not None and not end.failed and run.data_files:
                taken = pipelines.taken(self._db, row.id) | pipelines.chosen(self._db, run_id)
                pipelines.take(self._db, row.id, taken)
            pipelines.shorten(self._db, run_id)
            record(
                self._context,
                caller_of(self._db, run.key_id),
                "pipeline.end",
                row.name,
                outcome="failed" if end.failed and not cancelled else "done",
                run=run_id,
                state=state,
                reason=end.reason,
            )
            pipelines.forget_old_runs(self._db, row.id)
        job = jobs.find(self._db, run.job_id) if run.job_id is not None else None
        if job is None or job.finished:
            for file_id in (run.file_id, run.made.get("prepared"), run.made.get("validation")):
                made = files.find(self._db, file_id or "", viewer=None, now_s=0)
                if made is not None and (file_id != run.file_id or made.filename.startswith(run.id)):
                    storage.remove(self._context, made)


def _check_may_read(data: Data, caller: Principal) -> None:
    """Raises NoData."""
    if data.elsewhere and not caller.is_admin:
        raise NoData("the key of this pipeline is not an administrator's any more, and may read no folder or bucket")


def _ended(step: dict[str, Any], end: End, cancelled: bool) -> dict[str, Any]:
    """A step as the API shows it once its run has ended."""
    if step["state"] == "running" or (step["state"] == "waiting" and step["began_s"] is not None):
        says = step["says"] if cancelled else end.reason if end.failed else step["says"]
        nothing = end.outcome == "nothing_new"
        return step | {
            "state": "failed" if end.failed else "done",
            "says": end.reason if nothing else says,
            "ended_s": time.time(),
        }
    return step | ({"state": "skipped"} if step["state"] == "waiting" else {})


def _next_s(schedule: Schedule, now_s: float, *, at_once: bool = False) -> float:
    """When the pipeline runs next. at_once: look at the data now."""
    if schedule.cron is not None:
        return next_firing_s(schedule.cron, schedule.tz, now_s)
    return now_s if at_once else now_s + schedule.every_s
