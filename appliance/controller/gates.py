"""Gates of fine-tuning jobs: a version answers once an evaluation lets it.

All state is in `JobRow.gate`, so a controller that was killed resumes at its next look. `version` is written before a
version that passed is activated; the verdict, its reason and whether it answers are written at once, afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from appliance.controller.access.model_access import caller_of, stored_model
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.evals.runner import insert_run
from appliance.controller.interfaces.errors import ApiError, SwapFailed
from appliance.controller.jobs.events import add_message, serve_version
from appliance.controller.models import activation
from appliance.store.objects import evals, job_records, jobs, models
from appliance.store.rows import EvalRunRow, JobRow

LOOK_EVERY_S = 1.0
LEVEL = 0.05
"""Probability that a version that is just as good is refused as worse."""
MOST_UNJUDGED = 0.05
"""Share of the items that may lack a verdict; with more, the gate is undecided."""
_PAGE = 100
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
        assert job.gate is not None
        made = models.versions_made_by(self._db, job.output_model, job.id)
        model = models.find(self._db, job.output_model)
        if job.phase != "succeeded" or not made or model is None:
            what = job.phase if job.phase != "succeeded" else "succeeded, and its version was deleted"
            self._decide(job, (_UNDECIDED, f"the job {what}"), activated=False)
            return
        version, active = made[-1].version, model.active_version
        begun = job.gate["version"] == version  # it passed, and its activation was under way when the controller ended
        if active == version and not begun:
            self._decide(job, (_UNDECIDED, "the version was made to answer before it was judged"), activated=True)
            return
        before = job.gate["before"] if begun else active
        numbers = {"version": version, "before": before}
        verdict = await self._judge(job, version, before)
        if verdict is None:
            return
        error = None
        if verdict[0] == "passed":
            jobs.update(self._db, job.id, gate={**(jobs.get(self._db, job.id).gate or {}), **numbers})
            error = await self._activate(job.output_model, version)
        reason = f"{verdict[1]}; it does not answer: {error}" if error else verdict[1]
        is_active = error is None if verdict[0] == "passed" else active == version
        self._decide(job, (verdict[0], reason), activated=is_active, **numbers)

    async def _judge(self, job: JobRow, version: str, before: str | None) -> Verdict | None:
        """The verdict; None while an evaluation runs or waits for a slot."""
        assert job.gate is not None
        least = job.gate["pass_rate_at_least"]
        if least is None and before is None:
            return "passed", "no version answered before"
        asked = {version: job_records.checkpoint_of(self._db, job.output_model, version)}
        if least is None and before is not None:
            asked[before] = None  # by its own engines
        try:
            runs = [self._run(job.id, one, name or f"{job.output_model}@{one}") for one, name in asked.items()]
        except ApiError as error:
            return None if error.passes else (_UNDECIDED, error.message)
        for run in runs:
            if run.status in ("failed", "canceled"):
                return _UNDECIDED, f"{run.id} {run.status}: {(run.error or {}).get('message', '')}"
        if not all(run.finished for run in runs):
            return None
        passed = [await asyncio.to_thread(self._passed, run.id) for run in runs]
        return threshold(passed[0], least) if least is not None else await asyncio.to_thread(not_worse, *passed)

    def _run(self, job_id: str, version: str, name: str) -> EvalRunRow:
        """The run in which this version is evaluated, begun if there is none yet. name: what is asked. Raises
        ApiError."""
        job = jobs.get(self._db, job_id)
        assert job.gate is not None
        runs = job.gate["runs"]
        if version in runs:
            if (known := evals.run_in_short(self._db, runs[version])) is None:
                raise ApiError(404, f"{runs[version]} was deleted")
            return known
        eval_id = job.gate["eval_id"]
        of = evals.find(self._db, eval_id, viewer=None)
        first = next(iter(runs.values()), None)  # the same data for all
        like = evals.find_run(self._db, first) if first else evals.newest_sampled(self._db, eval_id, viewer=None)
        if of is None or like is None:
            raise ApiError(404, f"{eval_id} or its run was deleted")
        with self._db.transaction():
            source = {**like.data_source, "model": name}
            run = insert_run(self._context, of, caller_of(self._db, job.key_id), source, name=f"gate of {job.id}")
            jobs.update(self._db, job.id, gate={**job.gate, "runs": {**runs, version: run.id}})
        return run

    def _passed(self, run_id: str) -> dict[int, bool | None]:
        """Whether each item passed, by its place in the data; None: it was not judged. Call it within a reading."""
        found, place = dict[int, bool | None](), -1
        while page := evals.judged_after(self._db, run_id, place, _PAGE):
            for item in page:
                results = item.results or []
                judged = item.status != "error" and bool(results) and not any("error" in one for one in results)
                found[item.place] = all(one["passed"] for one in results) if judged else None
            place = page[-1].place
        return found

    def _decide(self, job: JobRow, verdict: Verdict, *, activated: bool, **numbers: str | None) -> None:
        said = {"verdict": verdict[0], "reason": verdict[1], **numbers}
        with self._db.transaction():
            gate = jobs.get(self._db, job.id).gate or {}
            jobs.update(self._db, job.id, gate={**gate, **said, "activated": activated})
            record(self._context, caller_of(self._db, job.key_id), "gate.decide", job.output_model, job=job.id, **said)
            level = "info" if verdict[0] == "passed" else "warn"
            add_message(self._db, job.id, f"Gate: {verdict[0]}: {verdict[1]}", level=level, data={"gate": said})

    async def _activate(self, name: str, version: str) -> SwapFailed | None:
        why = f"{version} of {name} passed its gate"
        async with activation.lock(name):
            model = stored_model(self._db, name)
            if model.active_version is None:
                serve_version(self._db, name, version)
                self._context.routing.models_changed()
                self._context.scheduler.nudge(why)
            elif model.active_version != version:
                try:
                    await activation.switch(self._context, model, version, why)
                except SwapFailed as error:
                    return error
        return None


Passed = Mapping[int, bool | None]


def threshold(passed: Passed, least: float) -> Verdict:
    if unjudged := _unjudged(passed):
        return _UNDECIDED, unjudged
    known = [one for one in passed.values() if one is not None]
    rate = sum(known) / len(known)
    return "passed" if rate >= least else "refused", f"{rate:.1%} of {len(known)} items passed, of {least:.1%} needed"


def not_worse(new: Passed, old: Passed) -> Verdict:
    """Refuses a version that is shown to be worse on the same items: McNemar's exact test, one-sided."""
    from scipy.stats import binomtest  # takes a second, of boxes with gates alone

    if unjudged := _unjudged(new) or _unjudged(old):
        return _UNDECIDED, unjudged
    pairs = [(new[place], old[place]) for place in new.keys() & old.keys()]
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    p = binomtest(lost, gained + lost, alternative="greater").pvalue if gained + lost else 1.0
    reason = f"{gained} items gained and {lost} lost of {len(pairs)}, against the version before (p = {p:.2g})"
    return "refused" if p < LEVEL else "passed", reason


def _unjudged(passed: Passed) -> str:
    """Reason why a run judged too few of its items; "" if it judged enough."""
    missing = sum(one is None for one in passed.values())
    return "" if passed and missing <= MOST_UNJUDGED * len(passed) else f"{missing} of {len(passed)} items not judged"
