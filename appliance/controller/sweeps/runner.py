"""Carries out sweeps: every few seconds it makes the jobs of a round, reads their results, and chooses the trials that
go on. All that must outlive the controller is in the rows; a job is made in the transaction that records it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import Any

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.one_each import OneEach
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.jobs.validation import JobValidation
from appliance.controller.jobs.wanted import ask
from appliance.controller.models import removal
from appliance.controller.openai.new_job import insert_job
from appliance.controller.sweeps import halving
from appliance.controller.sweeps.halving import Round
from appliance.controller.sweeps.spec import SweepSpec, job_of, trials_of
from appliance.store.ids import new_id
from appliance.store.objects import files, job_records, jobs, models, sweeps
from appliance.store.records import keys, usage
from appliance.store.rows import JobRow, RunState, SweepRow
from train.data.part import NoPart, write_apart

log = logging.getLogger("appliance.controller")
LOOK_EVERY_S = 2.0
_AT_ONCE = 8
"""Jobs that are stopped in one go, before others have their turn: forty took the loop 50 ms."""
LEAST_LINES = 16
"""The least lines of a part: fewer are no training data."""


class _Failed(Exception):
    pass


class SweepRunner:
    def __init__(self, context: ControllerContext, validation: JobValidation):
        self._context, self._db, self._validation = context, context.db, validation

        self._going = OneEach(context.background, "sweep")
        self._beginning = asyncio.Lock()
        """One job at a time is made, over all sweeps: sixty at once took the loop 0.3 s, one of each sweep 0.1."""
        self._ending: set[str] = set()
        """Sweeps whose jobs are being stopped, a few at a time: none of their jobs is begun any more."""
        self.tasks = self._going.tasks

    async def look(self) -> None:
        """One round, a task for each sweep: making a part of much data takes minutes, and others' sweeps go on
        meanwhile."""
        for sweep_id in sweeps.running(self._db):
            await self._going.begin(sweep_id, partial(self._look_at, sweep_id))

    async def _look_at(self, sweep_id: str) -> None:
        row = sweeps.find(self._db, sweep_id)
        if row is None or row.state != "running":
            return
        spec = SweepSpec.model_validate(row.spec)
        try:
            if how := keys.how_ended(self._db, row.key_id):
                raise _Failed(f"the key of this sweep {how}")
            row = self._read(row)
            spent_s = usage.device_s(self._db, _job_ids(row), time.time())
            sweeps.update(self._db, row.id, spent_s=spent_s)
            if spent_s >= spec.device_hours * 3600:
                reason = f"its {spec.device_hours:g} device-hours are spent"
                await self._end(row, "succeeded", reason, stop_first=True)
                return
            await self._go_on(row, spec)
        except ApiError as error:
            if not error.passes:
                await self._end(row, "failed", error.message)
            elif row.reason != error.message:
                sweeps.update(self._db, row.id, reason=error.message)
        except (_Failed, NoPart, OSError) as error:
            await self._end(row, "failed", str(error))

    async def _go_on(self, row: SweepRow, spec: SweepSpec) -> None:
        """Raises ApiError, NoPart, OSError, _Failed."""
        plan = halving.rounds(len(row.trials), spec.first, spec.keep_one_in)
        mine = [number for number, trial in enumerate(row.trials) if len(trial["jobs"]) > row.round]
        chosen = self._chosen(row, plan)
        if missing := [number for number in chosen if number not in mine]:
            file_id = await self._part(row, spec, plan[row.round])
            for number in missing:
                async with self._beginning:
                    self._begin(row.id, spec, number, file_id)
                    await asyncio.sleep(0)
            return
        losses = {number: row.trials[number]["jobs"][row.round] for number in mine}
        if any(one["state"] == "running" for one in losses.values()):
            done = sum(one["state"] != "running" for one in losses.values())
            reason = (
                f"round {row.round + 1} of {len(plan)}: {done} of {len(mine)} trials on {plan[row.round].share:.2%}"
            )
            if reason != row.reason:
                sweeps.update(self._db, row.id, reason=f"{reason} of the data")
            await self._delete_models(row, keep=None)
            return
        if not halving.best({number: one["loss"] for number, one in losses.items()}, 1):
            raise _Failed(f"no trial of round {row.round + 1} came to a loss")
        if row.round + 1 == len(plan):
            await self._end(row, "succeeded", f"{len(plan)} rounds")
            return
        sweeps.update(self._db, row.id, round=row.round + 1)

    def _chosen(self, row: SweepRow, plan: list[Round]) -> list[int]:
        """The trials of the round that goes on."""
        if row.round == 0:
            return list(range(len(row.trials)))
        before = row.round - 1
        losses = {
            number: trial["jobs"][before]["loss"]
            for number, trial in enumerate(row.trials)
            if len(trial["jobs"]) > before
        }
        return halving.best(losses, plan[row.round].trials)

    def _begin(self, sweep_id: str, spec: SweepSpec, number: int, file_id: str) -> None:
        """Raises ApiError."""
        with self._db.transaction():
            row = sweeps.find(self._db, sweep_id)
            if row is None or row.state != "running" or sweep_id in self._ending:
                return
            caller = caller_of(self._db, row.key_id)
            job = insert_job(self._context, job_of(spec, row.trials[number]["parameters"], file_id), caller)
            trials = _copied(row.trials)
            trials[number]["jobs"].append({"job_id": job.id, "state": "running", "loss": None})
            sweeps.update(self._db, row.id, trials=trials)
        self._validation.start(job.id)

    def _read(self, row: SweepRow) -> SweepRow:
        """Reads the results of jobs since the last look."""
        trials = _copied(row.trials)
        for one in (one for trial in trials for one in trial["jobs"] if one["state"] == "running"):
            job = jobs.find(self._db, one["job_id"])
            if job is None or job.finished:
                ended_well = job is not None and job.phase == "succeeded"
                one |= {
                    "state": "succeeded" if ended_well else "failed",
                    "loss": self._loss(job) if ended_well and job is not None else None,
                }
        if trials != row.trials:
            sweeps.update(self._db, row.id, trials=trials)
        return sweeps.find(self._db, row.id) or row

    def _loss(self, job: JobRow) -> float | None:
        """What trials are compared by; the least is best. Where rewards are learnt from, no loss says how good a model
        is: then it is minus the mean reward."""
        if job.valid_loss is not None:
            return _finite(job.valid_loss)
        reward = job_records.held_out_reward(self._db, job.id)
        return None if reward is None else _finite(-reward)

    # --- the data

    async def _part(self, row: SweepRow, spec: SweepSpec, of: Round) -> str:
        """The file with a round's share of the data, made once. Raises ApiError, NoPart, OSError, _Failed."""
        whole_id = str(spec.train["training_file"])
        if of.share >= 1:
            return whole_id
        if (known := row.files.get(str(row.round))) is not None:
            return known
        caller = caller_of(self._db, row.key_id)
        whole = files.find(self._db, whole_id, viewer=caller.viewer, now_s=time.time())
        if whole is None:
            raise _Failed(f"the file {whole_id} was deleted")
        if whole.status == "error":
            raise _Failed(f"the data was refused: {whole.status_details}")
        file_id = new_id("file-")
        context = self._context
        with context.quotas.receiving(caller) as took, storage.growing(context, file_id) as (incoming,):
            took(whole.bytes)
            source = context.files_dir / whole.id
            await context.file_work.run(row.owner, write_apart, source, incoming, of.share, LEAST_LINES)
            sha256 = await asyncio.to_thread(storage.sha256_of, incoming)
            name = f"{row.id}.{row.round + 1}.jsonl"
            made = await storage.described(context, file_id, incoming, filename=name, sha256=sha256, caller=caller)
            with storage.with_row(context, file_id):
                if (now := sweeps.find(self._db, row.id)) is None or now.state != "running":
                    return file_id  # the sweep was cancelled meanwhile, and no job begins with the file
                storage.keep(context, made, incoming)
                sweeps.update(self._db, row.id, files={**row.files, str(row.round): file_id})
        return file_id

    # --- ends

    async def cancel(self, row: SweepRow) -> None:
        """Idempotent."""
        if row.state == "running":
            await self._end(self._read(row), "cancelled", "cancelled by request")

    async def _stop_jobs(self, row: SweepRow) -> None:
        caller, ids = caller_of(self._db, None), _job_ids(row)
        for at in range(0, len(ids), _AT_ONCE):
            with self._db.transaction():  # one commit for some: each syncs the disk
                for job_id in ids[at : at + _AT_ONCE]:
                    job = jobs.find(self._db, job_id)
                    if job is not None and not job.finished:
                        ask(self._context, job.id, "cancel", caller)
            await asyncio.sleep(0)

    async def _end(self, row: SweepRow, state: RunState, reason: str, *, stop_first: bool = False) -> None:
        """Ends a sweep. Its best trial is that of the latest round in which one came to a loss. stop_first: the results
        of jobs that are stopped now count. Does nothing while the sweep is already being ended."""
        if row.id in self._ending:
            return
        self._ending.add(row.id)
        try:
            await self._stop_jobs(row)
            row = self._read(row) if stop_first else row
            best = self._ended(row, state, reason)
        finally:
            self._ending.discard(row.id)
        keep = row.trials[best]["jobs"][-1]["job_id"] if best is not None and state == "succeeded" else None
        await self._delete_models(row, keep=keep)
        for file_id in row.files.values():
            if (made := files.find(self._db, file_id, viewer=None, now_s=0)) is not None:
                storage.remove(self._context, made)

    def _ended(self, row: SweepRow, state: RunState, reason: str) -> int | None:
        """The number of the best trial."""
        found: list[int] = []
        for at in range(row.round, -1, -1):
            losses = {n: trial["jobs"][at]["loss"] for n, trial in enumerate(row.trials) if len(trial["jobs"]) > at}
            if found := halving.best(losses, 1):
                break
        best = found[0] if found else None
        with self._db.transaction():
            now_s = time.time()
            spent_s = usage.device_s(self._db, _job_ids(row), now_s)
            sweeps.update(self._db, row.id, state=state, reason=reason, best=best, spent_s=spent_s, ended_s=now_s)
            told = {"best": row.trials[best]["parameters"]} if best is not None else {}
            caller = caller_of(self._db, row.key_id)
            record(self._context, caller, "sweep.end", row.id, state=state, reason=reason, **told)
            sweeps.forget_old(self._db, row.owner)
        return best

    async def _delete_models(self, row: SweepRow, keep: str | None) -> None:
        """Deletes the models of jobs that have ended and are not of the current round; once the sweep has ended, all
        but that of the job `keep`."""
        caller = caller_of(self._db, row.key_id)
        ended = (sweeps.find(self._db, row.id) or row).state != "running"
        for trial in row.trials:
            for at, one in enumerate(trial["jobs"]):
                job = jobs.find(self._db, one["job_id"])
                if job is None or not job.finished or one["job_id"] == keep or (not ended and at >= row.round):
                    continue
                if models.find(self._db, job.output_model) is None:
                    continue
                try:
                    await removal.remove(self._context, removal.doomed(self._context, job.output_model), caller)
                except ApiError as error:  # somebody uses the trial's model: it stays
                    log.info("sweep: %s", error.message)


def begun(spec: SweepSpec) -> list[dict[str, Any]]:
    """A sweep's trials before the first round."""
    return [{"parameters": one, "jobs": []} for one in trials_of(spec)]


def _copied(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy in which the results of jobs may be changed. Parameters, of up to 64 KiB, are shared: copying them took
    each look at a sweep 20 ms."""
    return [{**trial, "jobs": [dict(one) for one in trial["jobs"]]} for trial in trials]


def _finite(loss: float | None) -> float | None:
    """What diverges has no loss to be compared by, and JSON no word for it."""
    return loss if loss is not None and math.isfinite(loss) else None


def _job_ids(row: SweepRow) -> list[str]:
    return [one["job_id"] for trial in row.trials for one in trial["jobs"]]
