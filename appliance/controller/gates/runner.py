"""Carries out gates: every second it looks at each one and does what its row says comes next.

All that must outlive the controller is in the rows: after a restart the next look goes on where the last one ended. A
version answers before the row says so; the look that finds it answering records that.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.access.model_access import caller_of, stored_model
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.one_each import OneEach
from appliance.controller.evals.new_run import insert_run
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.gates import verdict as verdicts
from appliance.controller.gates.verdict import Judged, Rules, Suite, Verdict
from appliance.controller.interfaces.errors import ApiError, Conflict, SwapFailed
from appliance.controller.jobs.events import add_message, answer_with
from appliance.controller.jobs.gate_request import RULES
from appliance.controller.models.activation import Activations
from appliance.controller.models.canaries import Canaries
from appliance.store.database import BOX
from appliance.store.objects import evals, gates, job_records, jobs, models
from appliance.store.records import canaries
from appliance.store.rows import CanaryRow, EvalRunRow, GateRow, GateVerdict

LOOK_EVERY_S = 1.0
SIDES = ("candidate", "incumbent")
_PAGE = 100
"""Items read at a time, each with the verdicts of up to 32 graders."""
_NUMBERS = ("name", "candidate", "incumbent", "compared")


class GateRunner:
    def __init__(
        self, context: ControllerContext, evaluations: EvalRunner, activations: Activations, compared: Canaries
    ):
        self._context, self._db = context, context.db
        self._evaluations, self._activations, self._canaries = evaluations, activations, compared

        self._going = OneEach(context.background, "gate")
        self._deciding = asyncio.Lock()
        """One thread at a time reads and computes: for each rule 1,000 rewards take it 0.6 s, and each such thread
        takes Python's lock from the loop for 5 ms whenever it releases it. All items of many gates read at once held
        the loop page by page: a page of each gate in every round of the loop."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By owner, because only one gate of each waits for that thread, however many have all their results."""
        self.tasks = self._going.tasks

    async def look(self) -> None:
        """One round: a task for each gate that has not ended, because a switch to another version may take minutes."""
        for gate_id in gates.unfinished(self._db):
            await self._going.begin(gate_id, partial(self._look_at, gate_id))

    async def _look_at(self, gate_id: str) -> None:
        row = gates.outline(self._db, gate_id)
        if row is None or row.state == "ended":
            return
        model = models.find(self._db, row.model)
        if row.state != "waiting" and (model is None or models.find_version(self._db, row.model, row.version) is None):
            self._end(row, "undecided", f"{row.version} of {row.model} was deleted")
        elif row.state == "waiting":
            self._await_job(row)
        elif row.state == "evaluating":
            await self._evaluate(row)
        elif row.state == "passed":
            await self._let_answer(row)
        elif row.state == "canary":
            self._watch_canary(row)

    # --- the job

    def _await_job(self, row: GateRow) -> None:
        job = jobs.find(self._db, row.job_id)
        if job is None or (job.finished and job.phase != "succeeded"):
            phase = "was deleted" if job is None else job.phase
            self._end(row, "undecided", f"{row.job_id} {phase}, so there is no version to judge")
        elif job.finished:
            made = models.versions_made_by(self._db, row.model, row.job_id)
            model = models.find(self._db, row.model)
            if not made or model is None:
                self._end(row, "undecided", f"what {row.job_id} made was deleted")
                return
            before = (model.active_version if model.active_version != made[-1].version else None) or ""
            gates.update(
                self._db, row.id, state="evaluating", version=made[-1].version, before=before, reason="it is judged"
            )

    # --- its suites

    async def _evaluate(self, row: GateRow) -> None:
        active = stored_model(self._db, row.model).active_version or ""
        if active == row.version:  # somebody let the version answer meanwhile
            self._cancel_runs(row)
            self._end(row, "undecided", f"{row.version} was made to answer before it was judged", activated=1)
            return
        if active != row.before:
            self._compare_with(row, active)
            return
        waits, refused = list[str](), False
        for place in range(gates.suites_of(self._db, row.id)):
            for side in SIDES if row.before else SIDES[:1]:
                run_id = row.runs.get(str(place), {}).get(side)
                run = evals.run_in_short(self._db, run_id) if run_id else None
                if run_id is None and refused:
                    continue  # what there was no place for just now, there is none for
                if run_id is None:
                    try:
                        # Checked before anything is read for the gate, because one that waits for a place asks every
                        # second.
                        self._context.quotas.check_eval_run(caller_of(self._db, row.key_id))
                        self._begin(row.id, place, side)
                        waits.append(f"the {side} is asked")
                    except ApiError as error:
                        if not error.passes:
                            self._undecided(row, f"{self._suite(row, place)} cannot be run: {error.message}")
                            return
                        waits.append(error.message)
                        refused = True
                elif run is None:
                    self._undecided(row, f"the run {run_id} of {self._suite(row, place)} was deleted")
                    return
                elif run.status in ("failed", "canceled"):
                    why = (run.error or {}).get("message", "") or run.status
                    self._undecided(row, f"the run {run.id} of {self._suite(row, place)} has {run.status}: {why}")
                    return
                elif not run.finished:
                    waits.append(self._progress(run, side))
        if not waits:
            await self._decide(row.id, row.owner)
        elif row.reason != waits[0]:
            gates.update(self._db, row.id, reason=waits[0])

    def _suite(self, row: GateRow, place: int) -> str:
        """The name of the suite."""
        return str((gates.find(self._db, row.id) or row).terms["suites"][place]["name"])

    def _begin(self, gate_id: str, place: int, side: str) -> None:
        """Begin a run, or reuse an earlier run of the same version on the same data. Raises ApiError."""
        if (row := gates.find(self._db, gate_id)) is None:
            return
        suite = row.terms["suites"][place]
        earlier = self._earlier(row, suite) if side == "incumbent" else None
        with self._db.transaction():
            if earlier is None:
                of = evals.find(self._db, suite["eval_id"], viewer=None)
                if of is None:
                    raise ApiError(404, f"{suite['eval_id']} was deleted")
                source = {**suite["data_source"], "model": self._asked_as(row, side)}
                run = insert_run(self._context, of, caller_of(self._db, row.key_id), source, name=f"{row.id} {side}")
                found = run.id
            else:
                found = earlier
            runs = {**row.runs, str(place): {**row.runs.get(str(place), {}), side: found}}
            gates.update(self._db, row.id, runs=runs)
        if earlier is None:
            self._evaluations.begin(found)

    def _earlier(self, row: GateRow, suite: dict[str, Any]) -> str | None:
        """The run that judged the version that answers now, if it was on the same data."""
        gate = gates.of_version(self._db, row.model, row.before)
        for place, known in enumerate(gate.terms["suites"] if gate is not None else ()):
            if (known["eval_id"], known["data_source"]) == (suite["eval_id"], suite["data_source"]):
                assert gate is not None
                run_id = gate.runs.get(str(place), {}).get("candidate")
                run = evals.run_in_short(self._db, run_id) if run_id else None
                if run is not None and run.status == "completed":
                    return run.id
        return None

    def _asked_as(self, row: GateRow, side: str) -> str:
        """The name under which engines are asked for the version: the model's own name if the version answers,
        otherwise the name of its checkpoint."""
        if side == "incumbent":
            return f"{row.model}@{row.before}"
        name = job_records.checkpoint_of(self._db, row.model, row.version)
        return name or f"{row.model}@{row.version}"

    def _progress(self, run: EvalRunRow, side: str) -> str:
        done = sum(run.counts.values())
        why = self._evaluations.waits_for(run)
        return f"the {side} is asked: {done} of {run.total or '?'} items" + (f"; {why}" if why else "")

    def _compare_with(self, row: GateRow, active: str) -> None:
        """Another version answers than when it was begun."""
        self._cancel_runs(row, SIDES[1:])
        runs = {
            place: {side: one for side, one in ids.items() if side != "incumbent"} for place, ids in row.runs.items()
        }
        reason = f"{active} answers now, and is what it is compared with"
        gates.update(
            self._db, row.id, state="evaluating", before=active, runs=runs, reason=reason, verdict=None, told=[]
        )

    async def _decide(self, gate_id: str, owner: str) -> None:
        async with self._turns.setdefault(owner, asyncio.Lock()), self._deciding:
            found = await self._db.read(BOX, self._suites, gate_id)
            verdict = await asyncio.to_thread(verdicts.decide, found)
        row = gates.find(self._db, gate_id)
        if row is not None and row.state == "evaluating":
            self._decided(row, verdict)

    def _suites(self, gate_id: str) -> list[Suite]:
        """The suites of a gate whose runs have all ended; [] if the gate is gone. Call it within a reading."""
        row = gates.find(self._db, gate_id)
        found: list[Suite] = []
        if row is None:
            return found
        for place, suite in enumerate(row.terms["suites"]):
            rules = Rules(**{name: suite[name] for name in RULES}, level=row.terms["level"])
            ids = row.runs[str(place)]
            judged = [self._judged(ids[side], suite["criterion"]) for side in SIDES if side in ids]
            found.append(Suite(suite["name"], rules, judged[0], judged[1] if len(judged) > 1 else None))
        return found

    def _judged(self, run_id: str, criterion: str | None) -> list[Judged]:
        found: list[Judged] = []
        place = -1
        while page := evals.judged_after(self._db, run_id, place, _PAGE):
            found += [verdicts.judged(item, criterion) for item in page]
            place = page[-1].place
        return found

    def _undecided(self, row: GateRow, reason: str) -> None:
        self._cancel_runs(row)
        self._decided(row, Verdict("undecided", reason, []))

    def _decided(self, row: GateRow, found: Verdict) -> None:
        passed = found.verdict == "passed"
        suites = [one | {"runs": row.runs.get(str(place), {})} for place, one in enumerate(found.told)]
        with self._db.transaction():
            gates.update(
                self._db,
                row.id,
                verdict=found.verdict,
                reason=found.reason,
                told=suites,
                decided_s=time.time(),
                state="passed",
            )
            caller = caller_of(self._db, row.key_id)
            record(
                self._context,
                caller,
                "gate.decide",
                row.id,
                model=row.model,
                version=row.version,
                before=row.before,
                verdict=found.verdict,
                reason=found.reason,
                numbers=[{name: one[name] for name in _NUMBERS} for one in suites],
            )
            level = "info" if passed else "warn"
            add_message(
                self._db,
                row.job_id,
                f"{row.id} of {row.version}: {found.verdict}: {found.reason}",
                level=level,  # type: ignore[arg-type]
                data={"gate": row.id, "verdict": found.verdict},
            )
            if not passed or row.terms["then"] == "hold":
                self._end(row, found.verdict, found.reason)

    # --- into traffic

    async def _let_answer(self, row: GateRow) -> None:
        model = stored_model(self._db, row.model)
        if model.active_version == row.version:
            self._end(row, "passed", row.reason, activated=1)
        elif (model.active_version or "") != row.before:
            self._compare_with(row, model.active_version or "")
        elif not row.before:
            with self._db.transaction():
                answer_with(self._db, row.model, row.version)
                self._end(row, "passed", row.reason, activated=1)
            self._context.models_shared()
            self._context.scheduler.nudge(f"{row.version} is the first version of {row.model} that answers")
        elif self._other_kind(row):
            self._end(row, "passed", f"{row.reason}; it does not answer: one is an adapter, the other whole weights")
        elif (terms := gates.canary_of(self._db, row.id)) is not None:
            self._begin_canary(row, terms)
        else:
            await self._switch(row)

    def _other_kind(self, row: GateRow) -> bool:
        found = [models.find_version(self._db, row.model, one) for one in (row.version, row.before)]
        return len({bool(one.meta.get("adapter")) for one in found if one is not None}) > 1

    async def _switch(self, row: GateRow) -> None:
        caller = caller_of(self._db, row.key_id)
        async with self._activations.lock(row.model):
            model = stored_model(self._db, row.model)
            if model.active_version != row.before or (now := gates.find(self._db, row.id)) is None:
                return  # the next look says what to do
            if now.state != "passed":
                return
            detail = {"before": row.before, "to": row.version, "gate": row.id}
            try:
                await self._activations.switch(model, row.version, f"{row.version} of {row.model} passed {row.id}")
            except SwapFailed as error:
                record(self._context, caller, "gate.activate", row.model, outcome="failed", error=str(error), **detail)
                self._end(row, "passed", f"{row.reason}; it does not answer: {error}")
                return
            record(self._context, caller, "gate.activate", row.model, **detail)
            self._end(row, "passed", row.reason, activated=1)

    def _begin_canary(self, row: GateRow, terms: dict[str, Any]) -> None:
        running = canaries.find_running(self._db, row.model)
        if running is not None and running.version != row.version:
            return  # a canary of somebody else: this gate's turn comes once it has ended
        if running is None:
            canary = CanaryRow(
                row.model,
                row.version,
                row.before,
                terms["share"],
                time.time(),
                auto=1,
                watch_s=terms["watch_s"],
                min_requests=terms["min_requests"],
            )
            try:
                with self._db.transaction():
                    self._canaries.begin(canary, caller_of(self._db, row.key_id))
                    gates.update(self._db, row.id, state="canary")
            except Conflict as error:
                self._end(row, "passed", f"{row.reason}; it does not answer: {error.message}")
            return
        gates.update(self._db, row.id, state="canary")

    def _watch_canary(self, row: GateRow) -> None:
        found = canaries.find(self._db, row.model)
        active = stored_model(self._db, row.model).active_version
        if active == row.version:
            self._end(row, "passed", f"{row.reason}; as a canary it was promoted", activated=1)
        elif found is None or found.version != row.version or found.state != "running":
            why = found.reason if found is not None and found.version == row.version else "it was replaced"
            self._end(row, "passed", f"{row.reason}; as a canary it was taken back: {why}")

    # --- ends

    def cancel(self, gate_id: str) -> None:
        """Cancel the gate: its version stays and does not answer. Raises Conflict if its canary runs."""
        row = gates.find(self._db, gate_id)
        if row is None or row.state == "ended":
            return
        if row.state == "canary":
            raise Conflict(
                f"{row.version} of {row.model} has passed and is its canary; promote it or roll it back.",
                param="gate_id",
                code="canary_running",
            )
        self._cancel_runs(row)
        self._end(row, "cancelled", "cancelled by request")

    def _cancel_runs(self, row: GateRow, sides: tuple[str, ...] = SIDES) -> None:
        for ids in row.runs.values():
            for side in sides:
                run = evals.run_in_short(self._db, ids[side]) if side in ids else None
                if run is not None and not run.finished:
                    self._evaluations.cancel(run.id)

    def _end(self, row: GateRow, verdict: GateVerdict, reason: str, activated: int = 0) -> None:
        gates.update(
            self._db,
            row.id,
            state="ended",
            verdict=verdict,
            reason=reason,
            activated=activated,
            ended_s=time.time(),
        )
