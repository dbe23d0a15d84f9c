"""Gates of fine-tuning jobs: a version answers once an evaluation lets it.

All state is in `JobRow.gate`, so a killed controller resumes at the next check: first the verdict is written, then a
version that passed is activated, then `activated` records whether it is active.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.context import ControllerContext, record
from appliance.controller.grading.evals import insert_run
from appliance.controller.interfaces.errors import ApiError, SwapFailed
from appliance.controller.jobs.events import add_message
from appliance.controller.models import activation
from appliance.store import evals, jobs, models
from appliance.store.database import RowNotFound
from appliance.store.rows import EvalRunRow, JobRow

LOOK_EVERY_S = 1.0
LEVEL = 0.05
"""Probability that a version that is just as good is refused as worse."""
MOST_UNJUDGED = 0.05
"""Share of the items that may lack a verdict; with more, the gate is undecided."""
_UNDECIDED = "undecided"

Verdict = tuple[str, str]
"""passed, refused or undecided, and why."""


class Gates:
    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db

    async def look(self) -> None:
        """Advance the gates of ended jobs."""
        for job_id in jobs.gated(self._db):
            with self._context.background.guard(f"gate of {job_id}"):
                await self._look_at(jobs.get(self._db, job_id))

    async def _look_at(self, job: JobRow) -> None:
        gate, name = job.gate or {}, job.output_model
        if gate["verdict"] is None:
            versions_made, model = models.versions_made_by(self._db, job.id), models.find(self._db, name)
            versions: dict[str, str | None] = {}
            if job.phase == "succeeded" and versions_made and model is not None:
                versions = {"version": versions_made[-1].version, "before": model.active_version}
                verdict = await self._judge(job, versions_made[-1].version, model.active_version)
            else:
                outcome = job.phase if job.phase != "succeeded" else "succeeded, and its version was deleted"
                verdict = _UNDECIDED, f"the job {outcome}"
            if verdict is None:
                return
            gate = self._set(job.id, verdict=verdict[0], reason=verdict[1], **versions)
        error = await self._activate(name, gate["version"]) if gate["verdict"] == "passed" else ""
        reason = f"{gate['reason']}; it does not answer: {error}" if error else gate["reason"]
        model = models.find(self._db, name)
        answers = model is not None and gate["version"] is not None and model.active_version == gate["version"]
        with self._db.transaction():
            gate = self._set(job.id, activated=answers, reason=reason)
            decision = {field: gate[field] for field in ("verdict", "reason", "version", "before")}
            record(self._context, caller_of(self._db, job.key_id), "gate.decide", name, job=job.id, **decision)
            level = "info" if gate["verdict"] == "passed" else "warn"
            add_message(self._db, job.id, f"Gate: {gate['verdict']}: {reason}", level=level, data={"gate": decision})

    def _set(self, job_id: str, **changes: Any) -> dict[str, Any]:
        """Store these changes of a job's gate; return the gate."""
        gate = {**(jobs.get(self._db, job_id).gate or {}), **changes}
        jobs.update(self._db, job_id, gate=gate)
        return gate

    async def _judge(self, job: JobRow, version: str, before: str | None) -> Verdict | None:
        """Return the verdict; None while an evaluation runs or waits for a slot."""
        least: float | None = (job.gate or {})["pass_rate_at_least"]
        if version == before:
            return _UNDECIDED, "the version was made to answer before it was judged"
        if least is None and before is None:
            return "passed", "no version answered before"
        versions = [version] if least is not None or before is None else [version, before]
        try:
            runs = [self._run(job.id, judged) for judged in versions]
        except ApiError as error:
            return None if error.status_code in (429, 507) else (_UNDECIDED, error.message)  # a bound or a full disk
        for run in runs:
            if run.status in ("failed", "canceled"):
                return _UNDECIDED, f"{run.id} {run.status}: {(run.error or {}).get('message', '')}"
        if not all(run.finished for run in runs):
            return None
        passed = [await asyncio.to_thread(evals.passed, self._db, run.id) for run in runs]
        return threshold(passed[0], least) if least is not None else await asyncio.to_thread(not_worse, *passed)

    def _run(self, job_id: str, version: str) -> EvalRunRow:
        """Return the run that evaluates this version; begin the run if there is none. Raises ApiError."""
        job = jobs.get(self._db, job_id)
        gate = job.gate or {}
        runs, eval_id = gate["runs"], gate["eval_id"]
        if version in runs:
            if (known := evals.find_run(self._db, runs[version])) is None:
                raise ApiError(404, f"{runs[version]} was deleted")
            return known
        evaluation = evals.find(self._db, eval_id, viewer=None)
        first = next(iter(runs.values()), None)  # the same data for all runs
        like = evals.find_run(self._db, first) if first else evals.newest_sampled(self._db, eval_id, viewer=None)
        if evaluation is None or like is None:
            raise ApiError(404, f"{eval_id} or its run was deleted")
        # Only the new version may be a checkpoint: the previous one has its own engines.
        row = None if runs else models.find_version(self._db, job.output_model, version)
        checkpoint = row.checkpoint if row is not None else None
        with self._db.transaction():
            source = {**like.data_source, "model": checkpoint or f"{job.output_model}@{version}"}
            caller = caller_of(self._db, job.key_id)
            run = insert_run(self._context, evaluation, caller, source, name=f"gate of {job.id}")
            self._set(job.id, runs={**runs, version: run.id})
        return run

    async def _activate(self, name: str, version: str) -> str:
        """Activate the version. Returns why it is not active, "" if it is."""
        why = f"{version} of {name} passed its gate"
        async with activation.lock(name):
            model = models.find(self._db, name)
            try:
                if model is None:
                    return "the model was deleted"
                if model.active_version is None:
                    models.serve(self._db, name, version)
                    self._context.routing.models_changed()
                    self._context.scheduler.nudge(why)
                elif model.active_version != version:
                    await activation.switch(self._context, model, version, why)
            except SwapFailed as error:
                return str(error)
            except RowNotFound:
                return "the version was deleted"
        return ""


Passed = Mapping[int, bool | None]


def threshold(passed: Passed, least: float) -> Verdict:
    if unjudged := _unjudged(passed):
        return _UNDECIDED, unjudged
    judged = [result for result in passed.values() if result is not None]
    rate = sum(judged) / len(judged)
    return "passed" if rate >= least else "refused", f"{rate:.1%} of {len(judged)} items passed, of {least:.1%} needed"


def not_worse(new: Passed, old: Passed) -> Verdict:
    """Refuse a version that is significantly worse on the same items, by McNemar's exact test, one-sided."""
    from scipy.stats import binomtest  # importing scipy takes a second; only boxes with gates need it

    if unjudged := _unjudged(new) or _unjudged(old):
        return _UNDECIDED, unjudged
    pairs = [(new[place], old[place]) for place in new.keys() & old.keys()]
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    p = binomtest(lost, gained + lost, alternative="greater").pvalue if gained + lost else 1.0
    reason = f"{gained} items gained and {lost} lost of {len(pairs)}, against the version before (p = {p:.2g})"
    return "refused" if p < LEVEL else "passed", reason


def _unjudged(passed: Passed) -> str:
    """Return why a run judged too few of its items; "" if it judged enough."""
    missing = sum(result is None for result in passed.values())
    return "" if passed and missing <= MOST_UNJUDGED * len(passed) else f"{missing} of {len(passed)} items not judged"
