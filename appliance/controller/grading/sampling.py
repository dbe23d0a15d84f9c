"""Lets engines of the base model sample a training job's rollouts: on capacity that interactive requests leave idle,
behind everybody in an engine's queue.

A question names the version that answers it. A question that is asked `in_flight` continues on the newest version that
the job has asked about: as soon as a question names a newer one, answers by older ones are interrupted where they are.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from appliance.controller.access.model_access import may_use, unknown_model
from appliance.controller.access.spending import Spending, quota_of
from appliance.controller.engines import sampling
from appliance.controller.engines.sampling_engines import SocketEngines
from appliance.controller.grading.spans import Line, is_newer, lines, written
from appliance.controller.interfaces.records import LineReturned
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long without any answer, before the ranks sample the rest themselves: the job's devices stand still meanwhile."""
MOST_AT_ONCE = 256
"""The most requests of one question at a time, however much capacity engines have."""
LOOK_EVERY_S, WANTS_EVERY_S = 0.5, 10.0
TRIES = 5
"""How often one request is tried, each time at an engine that was then wanted for something else."""
MOST_DEATHS = 2
"""So many engines may die while they sample for a job; after that its ranks sample. The cause, its prompts or its
weights, comes back with each step, and other requests of these engines are lost with them."""


@dataclass(slots=True, eq=False)
class _Question:
    """One question of a job's ranks, while its requests are asked. key_id: who pays. patience_s: after the last answer,
    at moved_s. flying: its requests at engines, by their ids, each with the version that answers; taken: the room of
    engines that they take, in requests. why: no further request is made. died: an engine died with one of its requests;
    counted: that death was counted for another question. spent: rows for Spending."""

    job_id: str
    key_id: str
    asked: dict[str, Any]
    patience_s: float
    lines: deque[Line]
    moved_s: float = field(default_factory=time.monotonic)
    samples: list[dict[str, Any]] = field(default_factory=list)
    spent: list[dict[str, Any]] = field(default_factory=list)
    flying: dict[str, tuple[Line, str]] = field(default_factory=dict)
    taken: Fraction = Fraction(0)
    why: str = ""
    died: bool = False
    counted: bool = False

    @property
    def wants(self) -> bool:
        return bool(self.lines) and not self.why

    def fly(self, request_id: str, line: Line, version: str) -> None:
        self.flying[request_id] = line, version
        self.taken += line.share

    def land(self, request_id: str) -> None:
        line, _ = self.flying.pop(request_id)
        self.taken -= line.share


class RolloutSampling:
    """Invariants: `_asking` has the questions of which some requests may be at engines, by model, in the order in which
    they came; `_newest` the version that each job has asked about last."""

    def __init__(self, db: Database, engines: SocketEngines, spending: Spending, patience_s: float = PATIENCE_S):
        self._db, self._engines, self._patience_s = db, engines, patience_s
        self._spending = spending
        self._asking: defaultdict[str, list[_Question]] = defaultdict(list)
        self._newest: dict[str, str] = {}
        self._moved = asyncio.Event()  # set and replaced when a request has ended or a question has no more
        self._gave_up: set[str] = set()  # jobs whose last question met no engine
        self._deaths: Counter[str] = Counter()  # of engines, by job

    async def look(self) -> None:
        """Models whose rollouts are to be sampled, and those that teach, may be woken, for as long as their jobs run;
        called every `WANTS_EVERY_S`."""
        wanted = [*jobs.models_sampled(self._db), *job_records.teachers_of_running(self._db)]
        self._engines.wants(list(dict.fromkeys(wanted)))
        for job_id in self._gave_up | self._deaths.keys() | self._newest.keys():
            row = jobs.find(self._db, job_id)
            if row is not None and row.finished:
                self._gave_up.discard(job_id)
                del self._deaths[job_id]
                self._newest.pop(job_id, None)

    async def sample(self, job_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """{"samples": [{"place" of the first, "ids", "log_probs", "spans"}], "why"}: the answers that engines gave to a
        question of train.rollouts.policy, and why there are no more; "" if all are there. An answer is whole or left
        out; its spans are [version, tokens] in order."""
        if self._deaths[job_id] >= MOST_DEATHS:
            return {"samples": [], "why": f"{MOST_DEATHS} engines ended while they sampled for it"}
        if request["room"] > sampling.LONGEST:
            return {
                "samples": [],
                "why": f"of log-probabilities engines write {sampling.LONGEST:,} for an answer at most",
            }
        row, model = jobs.find(self._db, job_id), request["base"]["model"]
        key = keys.find(self._db, row.key_id) if row is not None and row.key_id is not None else None
        if key is not None and not may_use(self._db, key.id, model):
            return {"samples": [], "why": unknown_model(model).message}
        if key is not None and (quota := quota_of(self._db, key, time.time())).spent_until_s is not None:
            return {"samples": [], "why": f"the quota of its key, {quota.spent}, is used up"}
        await self.look()
        patience_s = 0.0 if job_id in self._gave_up else self._patience_s
        in_flight = request.get("in_flight", False)
        wanted = deque(line for prompt in request["prompts"] for line in lines(prompt, request["room"], in_flight))
        question = _Question(job_id, key.id if key else "", request, patience_s, wanted)
        stale = self._moves_on(question)
        self._asking[model].append(question)
        try:
            async with asyncio.TaskGroup() as requests:
                if stale:
                    requests.create_task(self._engines.interrupt(stale))
                await self._ask_all(question, requests)
        finally:
            self._asking[model].remove(question)
            self._wake()
            self._pay(question)
        if question.died and not question.counted:
            self._deaths[job_id] += 1
            for other in self._asking[model]:  # they have requests at the same engine
                other.counted = other.counted or other.job_id == job_id
        (self._gave_up.add if not question.samples else self._gave_up.discard)(job_id)
        return {"samples": question.samples, "why": question.why}

    def _moves_on(self, question: _Question) -> list[str]:
        """The requests that its version interrupts, if it is newer than the job's others."""
        job_id, version = question.job_id, question.asked["policy"]["version"]
        before = self._newest.get(job_id)
        if before is not None and not is_newer(version, before):
            return []
        self._newest[job_id] = version
        asking = [one for one in self._asking[question.asked["base"]["model"]] if one.job_id == job_id]
        return [request_id for one in asking if one.asked.get("in_flight") for request_id in one.flying]

    async def _ask_all(self, question: _Question, requests: asyncio.TaskGroup) -> None:
        """One request after the other, while engines have room for them, until all have ended."""
        while question.wants or question.flying:
            if question.wants and not self._is_next(question):
                question.moved_s = time.monotonic()
            elif question.wants:
                why = self._why_no_room(question)
                if why is None:
                    self._begin(question, requests)
                    continue
                if not question.flying and time.monotonic() - question.moved_s > question.patience_s:
                    question.why = why
                    continue
            await self._something_moves()

    def _begin(self, question: _Question, requests: asyncio.TaskGroup) -> None:
        line, request_id = question.lines.popleft(), new_id("req_")
        newest, own = self._newest[question.job_id], question.asked["policy"]["version"]
        version = newest if question.asked.get("in_flight") else own
        question.fly(request_id, line, version)
        requests.create_task(self._ask(question, request_id, line, version))
        if not question.lines:
            self._wake()

    def _is_next(self, question: _Question) -> bool:
        """Whether it is the next question of its job."""
        asking = self._asking[question.asked["base"]["model"]]
        return next(one for one in asking if one.job_id == question.job_id and one.wants) is question

    def _why_no_room(self, question: _Question) -> str | None:
        """Why engines do not take a further request of it, None if they do."""
        base = question.asked["base"]
        asking = self._asking[base["model"]]
        own = [one for one in asking if one.job_id == question.job_id]
        room = self._engines.room(base["model"], base["version"])
        # Otherwise an owner who has requests there would get each place back that one of them leaves.
        share = -(-room.lines // len({one.job_id for one in asking}))
        wanted = question.lines[0].share
        taken, taken_by_job = (sum(one.taken for one in part) for part in (asking, own))
        is_free = taken + wanted <= room.lines and taken_by_job + wanted <= share
        if is_free and len(question.flying) < MOST_AT_ONCE:
            return None
        return room.why or "its engines are busy"

    async def _ask(self, question: _Question, request_id: str, line: Line, version: str) -> None:
        try:
            made = await self._asked(question, request_id, line, version)
        except LineReturned as error:
            question.lines.append(replace(line, tries=line.tries + 1))
            question.died = question.died or not error.yielded
            if not error.yielded or line.tries + 1 == TRIES:  # an engine died of it, or none keeps it
                question.why = str(error)
        except ValueError as error:
            question.why = str(error)
        else:
            question.moved_s = time.monotonic()
            whole, left = written(line, version, made)
            question.samples += whole
            question.lines.extendleft(reversed(left))
        finally:
            question.land(request_id)
            self._wake()

    async def _asked(self, question: _Question, request_id: str, line: Line, version: str) -> list[sampling.Sampled]:
        """Raises LineReturned; ValueError, in words, for an answer that has no samples."""
        request, base = question.asked, question.asked["base"]
        body = line.request(f"{request['policy']['name']}@{version}", request["room"], request["ends"])
        # An answer that goes on has had its prompt paid for.
        prompt = 0 if line.spans else len(line.tokens)
        unread = _spent(question.key_id, base["model"], "", prompt, 0)
        try:
            answer = await self._engines.sample(base["model"], base["version"], body, request_id)
        except asyncio.CancelledError:
            question.spent.append(unread)
            raise
        if answer.silent:
            question.spent.append(unread)
        if answer.status != 200:
            raise ValueError(_message(answer.body) or f"an engine answered with status {answer.status}")
        try:
            made = sampling.read(answer.body, line.n)
        except ValueError:
            question.spent.append(unread)
            raise
        count = sum(len(one.ids) for one in made)
        question.spent.append(_spent(question.key_id, base["model"], base["version"], prompt, count))
        return made

    async def _something_moves(self) -> None:
        """Returns when a request of any question has ended, or engines may have room."""
        waiting = [
            asyncio.ensure_future(self._moved.wait()),
            asyncio.ensure_future(self._engines.changed(LOOK_EVERY_S)),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _pay(self, question: _Question) -> None:
        """Records what engines wrote as its owner's usage of the base model. A step does not fail because a disk is
        full."""
        try:
            if question.spent:
                self._spending.take(question.spent)
        except sqlite3.Error as error:
            log.warning("what a job's rollouts used is counted with the next ones: %s", error)


def _message(body: Any) -> str:
    return str((body.get("error") or {}).get("message") or "") if isinstance(body, dict) else ""


def _spent(key_id: str, model: str, version: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """One request, as `Spending.take` takes it. key_id: "" for the box itself."""
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"key": key_id, "model": model, "version": version, "requests": 1, "errors": 0, **tokens}
