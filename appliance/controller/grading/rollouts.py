"""Writes the samples of jobs that train on their model's own answers, by one coroutine per job.

    newest weights in shared memory -> engines, through the gateway -> judge -> RUN_DIR/rollouts/train-3.json -> ranks

It is level-triggered: the newest weights and the existing files determine the missing files (train.rollouts.samples).
Whichever process dies, an existing file is never drawn again, and a missing one is drawn in full.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from appliance.controller.bus.asking import Asking
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.grading import judging
from appliance.controller.grading.judging import CannotGoOn, Grading, Sampled
from appliance.store import jobs
from appliance.store.database import Database
from appliance.store.rows import JobRow
from train.methods.methods import method_of
from train.plan.errors import TrainError
from train.plan.spec import TrainSpec
from train.rollouts.samples import FOLDER, Prompt, Samples, SamplesFile, SamplesPlan, Verdict
from weights.format.names import policy_name, step_of, version_name
from weights.memory.store import WeightStore

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Rollouts:
    """nudge: called when a job starts or stops waiting for samples."""

    db: Database
    store: WeightStore
    jobs_dir: Path
    routing: BusRouting
    asking: Asking
    grading: Grading
    nudge: Callable[[], Any]
    _followed: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # set by the next `follow`
    _drawn: dict[str, SamplesFile] = field(default_factory=dict)  # {job: file being drawn}
    _weights: dict[str, int] = field(default_factory=dict)  # {job: step of its newest weights}

    def starved(self, row: JobRow) -> bool:
        """Return whether the job's ranks wait for the samples being drawn. A job that released its devices meanwhile
        also waits for the samples of later steps."""
        file = self._drawn.get(row.id)
        return file is not None and (row.phase != "running" or file.step <= self._weights.get(row.id, -1))

    def published(self, job_id: str, step: int) -> None:
        """Note that the job's weights after this step are in shared memory."""
        self._weights[job_id] = step
        self.follow()
        self.nudge()

    def follow(self) -> None:
        """Keep a coroutine for each job that trains on its own answers; called periodically."""
        rows = {row.id: row for row in jobs.list_unfinished(self.db) if row.wanted == "run"}
        for job_id, task in list(self._followed.items()):
            if job_id not in rows or task.done():
                task.cancel()
                del self._followed[job_id]
                self._weights.pop(job_id, None)
        for row in rows.values():
            if row.id not in self._followed and row.resolved is not None and method_of(row.method).rolls_out:
                task = asyncio.create_task(self._follow(row.id), name=f"samples of {row.id}")
                task.add_done_callback(_log_failure)
                self._followed[row.id] = task
        self._news.set()
        self._news = asyncio.Event()

    async def _follow(self, job_id: str) -> None:
        plan: SamplesPlan | None = None
        try:
            while True:
                news = self._news
                plan = plan or await asyncio.to_thread(self._plan, job_id)
                step = await asyncio.to_thread(self._newest, plan) if plan is not None else -1
                missing = await asyncio.to_thread(plan.missing, step) if plan is not None and step >= 0 else []
                self._weights[job_id] = max(step, self._weights.get(job_id, -1))
                if plan is None or not missing:
                    if self._drawn.pop(job_id, None) is not None:
                        self.nudge()
                    await news.wait()
                    continue
                self._drawn[job_id] = missing[0]
                self.nudge()
                samples = await self._draw(jobs.get(self.db, job_id), plan, missing[0], step)
                await asyncio.to_thread(self._write, plan, missing[0], samples)
        finally:
            self._drawn.pop(job_id, None)

    def _plan(self, job_id: str) -> SamplesPlan | None:
        """Return the job's plan for samples; None before the job's first start."""
        folder = self.jobs_dir / job_id
        try:
            return SamplesPlan(TrainSpec.from_dict(json.loads((folder / "spec.json").read_bytes())))
        except (FileNotFoundError, TrainError):  # ranks report unusable data
            return None

    def _newest(self, plan: SamplesPlan) -> int:
        """Return the step of the newest weights in shared memory; -1 if there are none."""
        stored = self.store.list(plan.policy_kind, policy_name(plan.spec.job_id))
        return max((step_of(entry.version) for entry in stored), default=-1)

    async def _draw(self, row: JobRow, plan: SamplesPlan, file: SamplesFile, step: int) -> Samples:
        """Sample the answers of a file from the weights after this step, and judge them."""
        prompts = await asyncio.to_thread(plan.prompts, file)
        whole = plan.policy_kind == "version"
        spec, name = plan.spec, policy_name(row.id)
        version = version_name(step)
        await self.routing.offer_policy(name, spec.base_model, spec.base_version, version if whole else "")
        model, failed = name if whole else f"{name}@{version}", ""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._answered(row, plan, model, prompt, plan.group(file))) for prompt in prompts
                ]
        except* CannotGoOn as errors:
            failed = str(errors.exceptions[0])
        if failed:
            return Samples([], [], {}, step, failed)
        answers, verdicts = zip(*(task.result() for task in tasks), strict=True)
        sampled = [answer for group in answers for answer in group]
        return Samples(
            [np.array(answer.ids, np.int32) for answer in sampled],
            [np.array(answer.log_probs, np.float32) for answer in sampled],
            {name: [value for verdict in verdicts for value in verdict[name]] for name in verdicts[0]},
            step,
        )

    async def _answered(
        self, row: JobRow, plan: SamplesPlan, model: str, prompt: Prompt, n: int
    ) -> tuple[list[Sampled], Verdict]:
        """Return the answers to one prompt. Raises CannotGoOn."""
        room, form = plan.spec.options["max_completion_tokens"], plan.spec.options.get("response_format")
        each, name = max(1, min(judging.MOST_ANSWERS, judging.MOST_TOKENS // room)), policy_name(row.id)

        async def ask(first: int) -> list[Sampled]:
            count, seed = min(each, n - first), prompt.seed + first
            body = judging.sampling_request(
                model, prompt.tokens, n=count, seed=seed, max_tokens=room, ends=plan.ends, form=form
            )
            answer = await self.asking.ask(row.key_id, name, judging.URL, body, within_s=judging.ANSWER_WITHIN_S)
            if answer.error:
                raise ValueError(answer.error)
            return judging.samples_of(answer.body, count)

        try:
            parts = await asyncio.gather(*map(ask, range(0, n, each)))
        except ValueError as error:
            raise CannotGoOn(f"no engine of {plan.spec.base_model} samples answers: {error}") from error
        answers = [answer for part in parts for answer in part]
        return answers, await self.grading.verdict(row, prompt, answers)

    def _write(self, plan: SamplesPlan, file: SamplesFile, samples: Samples) -> None:
        """Write the file, and delete files of steps before the snapshot."""
        samples.write(file.path(plan.spec.run_dir))
        row = jobs.find(self.db, plan.spec.job_id)
        first = row.snapshot["step"] if row is not None and row.snapshot is not None else 0
        for path in (Path(plan.spec.run_dir) / FOLDER).glob("*-*.json"):
            if int(path.stem.partition("-")[2]) < first:
                path.unlink(missing_ok=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s stopped, and is retried", task.get_name(), exc_info=error)
