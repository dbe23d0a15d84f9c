"""Has the rollouts of a job that trains sampled by engines of its base: on what interactive requests leave idle, in as
many requests at once as lines of batches would have, and in an engine's queue behind everybody."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from appliance.controller.batches.metering import BYTES_PER_TOKEN, Metering, Sent, spent_by
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.ports import SAMPLING, LineReturned
from appliance.store.ids import new_id
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from serve.core import sampling

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Without any answer, before the ranks sample what is left: meanwhile the job's devices stand still."""
MOST_AT_ONCE = 256
"""Requests of one question, whatever engines have room for."""
LOOK_EVERY_S, WANTS_EVERY_S = 0.5, 10.0
TRIES = 5
"""Of one request, each at an engine that was then wanted for something else."""
MOST_DEATHS = 2
"""Engines that end while they sample for a job, before its ranks sample: whatever it brings that ends them, its prompts
or what it has learnt, comes again with each step, and other requests of these engines end with them."""


@dataclass(slots=True)
class _Line:
    """One request: `n` answers, of which the first has this place and this seed. tries: that came back."""

    place: int
    n: int
    seed: int
    tokens: list[int]
    tries: int = 0


@dataclass(slots=True)
class _Question:
    """One question of a job's ranks, while its requests are asked. key_id: who pays. patience_s: after the last answer,
    at moved_s. why: no further request is made. died: an engine did, with a request of it; counted: so it did with one
    of another question. spent: rows for Metering."""

    job_id: str
    key_id: str
    asked: dict[str, Any]
    patience_s: float
    lines: deque[_Line]
    moved_s: float = field(default_factory=time.monotonic)
    samples: list[dict[str, Any]] = field(default_factory=list)
    spent: list[dict[str, Any]] = field(default_factory=list)
    flying: int = 0
    why: str = ""
    died: bool = False
    counted: bool = False


class RolloutSampling:
    """Invariants: `_flying` counts the requests that are at engines of a model, `_asking` has the questions of which
    some may be, by model, in the order in which they came."""

    def __init__(self, context: ControllerContext, metering: Metering, patience_s: float = PATIENCE_S):
        self._db, self._engines, self._patience_s = context.db, context.batch_engines, patience_s
        self._metering = metering
        self._flying: Counter[str] = Counter()
        self._asking: defaultdict[str, list[_Question]] = defaultdict(list)
        self._gave_up: set[str] = set()  # jobs whose last question met no engine
        self._deaths: Counter[str] = Counter()  # of engines, by job

    async def look(self) -> None:
        """Models whose rollouts are to be sampled, and those that teach, may be woken, for as long as their jobs run;
        called every `WANTS_EVERY_S`."""
        wanted = [*jobs.models_sampled(self._db), *job_records.teachers_of_running(self._db)]
        self._engines.wants(list(dict.fromkeys(wanted)), SAMPLING)
        for job_id in self._gave_up | self._deaths.keys():
            row = jobs.find(self._db, job_id)
            if row is not None and row.finished:
                self._gave_up.discard(job_id)
                del self._deaths[job_id]

    async def sample(self, job_id: str, asked: dict[str, Any]) -> dict[str, Any]:
        """{"samples": [{"place" of the first, "ids", "log_probs"}], "why"}: the answers that engines gave to a question
        of train.rollouts.asked, and why there are no more; "" where all are there. An answer is whole or left out."""
        if self._deaths[job_id] >= MOST_DEATHS:
            return {"samples": [], "why": f"{MOST_DEATHS} engines ended while they sampled for it"}
        if asked["room"] > sampling.LONGEST:
            return {
                "samples": [],
                "why": f"of log-probabilities engines write {sampling.LONGEST:,} for an answer at most",
            }
        row, model = jobs.find(self._db, job_id), asked["base"]["model"]
        key = keys.find(self._db, row.key_id) if row is not None and row.key_id is not None else None
        if (refusal := self._metering.refusal(key, model, time.time())) is not None:
            return {"samples": [], "why": str(refusal.body["error"]["message"])}
        await self.look()
        patience_s = 0.0 if job_id in self._gave_up else self._patience_s
        lines = deque(line for prompt in asked["prompts"] for line in _lines(prompt, asked["room"]))
        question = _Question(job_id, key.id if key else "", asked, patience_s, lines)
        self._asking[model].append(question)
        try:
            await asyncio.gather(*(self._ask(question) for _ in range(min(MOST_AT_ONCE, len(lines)))))
        finally:
            self._asking[model].remove(question)
            self._pay(question)
        if question.died and not question.counted:
            self._deaths[job_id] += 1
            for other in self._asking[model]:  # an engine ends with the requests of all of them
                other.counted = other.counted or other.job_id == job_id
        (self._gave_up.add if not question.samples else self._gave_up.discard)(job_id)
        return {"samples": question.samples, "why": question.why}

    async def _ask(self, question: _Question) -> None:
        """One request after the other, while engines have room for them."""
        base = question.asked["base"]
        while question.lines and not question.why:
            room = self._engines.sampling_room(base["model"], base["version"])
            asking = self._asking[base["model"]]
            own = [one for one in asking if one.job_id == question.job_id]
            # Whose requests are there already would have each place again that one of them leaves.
            share = -(-room.lines // len({one.job_id for one in asking}))
            is_next = next(one for one in own if one.lines) is question
            if not is_next:
                question.moved_s = time.monotonic()
            if room.lines <= self._flying[base["model"]] or sum(one.flying for one in own) >= share or not is_next:
                if not question.flying and time.monotonic() - question.moved_s > question.patience_s:
                    question.why = room.why or "its engines are busy"
                    return
                await self._engines.changed(LOOK_EVERY_S)
                continue
            line = question.lines.popleft()
            self._flying[base["model"]] += 1
            question.flying += 1
            try:
                made = await self._asked(question, line)
            except LineReturned as error:
                question.lines.append(line)
                line.tries += 1
                question.died = question.died or not error.yielded
                if not error.yielded or line.tries == TRIES:  # an engine died of it, or none keeps it
                    question.why = str(error)
            except ValueError as error:
                question.why = str(error)
            else:
                question.moved_s = time.monotonic()
                ids, log_probs = [one.ids for one in made], [one.log_probs for one in made]
                question.samples.append({"place": line.place, "ids": ids, "log_probs": log_probs})
            finally:
                self._flying -= Counter([base["model"]])
                question.flying -= 1

    async def _asked(self, question: _Question, line: _Line) -> list[sampling.Sampled]:
        """Raises LineReturned; ValueError, in words, for an answer that has no samples."""
        asked = question.asked
        policy, base = asked["policy"], asked["base"]
        body = sampling.request(
            f"{policy['name']}@{policy['version']}",
            line.tokens,
            n=line.n,
            seed=line.seed,
            max_tokens=asked["room"],
            ends=asked["ends"],
        )
        size = len(line.tokens) * BYTES_PER_TOKEN
        sent = Sent(sampling.URL, {"n": line.n, "max_tokens": asked["room"]}, size, time.monotonic())
        try:
            answer = await self._engines.sample(base["model"], base["version"], body, new_id("req_"))
        except asyncio.CancelledError:
            # Whoever gives up pays for what was computed meanwhile.
            question.spent += self._metering.left(question.key_id, base["model"], [sent])
            raise
        if answer.status != 200:
            raise ValueError(_message(answer.body) or f"an engine answered with status {answer.status}")
        made = sampling.read(answer.body, line.n)
        written = sum(len(one.ids) for one in made)
        question.spent.append(spent_by(question.key_id, base["model"], base["version"], len(line.tokens), written))
        return made

    def _pay(self, question: _Question) -> None:
        """What engines wrote is its owner's usage, of the base. A step does not fail for want of disk."""
        try:
            self._metering.pay(question.spent)
        except sqlite3.Error as error:
            log.warning("what a job's rollouts used is counted with the next ones: %s", error)


def _lines(prompt: dict[str, Any], room: int) -> list[_Line]:
    """A prompt's answers in requests of as many as one may have."""
    most, n = sampling.answers_at_once(room), prompt["n"]
    return [
        _Line(prompt["place"] + first, min(most, n - first), prompt["seed"] + first, prompt["tokens"])
        for first in range(0, n, most)
    ]


def _message(body: Any) -> str:
    return str((body.get("error") or {}).get("message") or "") if isinstance(body, dict) else ""
