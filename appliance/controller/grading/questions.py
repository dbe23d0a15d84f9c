"""Answers questions of ranks: rewards by the job's grader, and how likely its teacher finds answers.

Models are asked on behalf of the job's key. The job's events say when it waits for them or they fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from appliance.controller.bus.asking import Asking
from appliance.controller.grading import scoring
from appliance.controller.grading.judged import all_graded_with_answers
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.jobs.events import add_message
from appliance.gateway.core.errors import ENGINES_DIED
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from train.graders.graders import parse
from train.graders.grading import Graded, ModelAnswer
from train.graders.hosts import GraderHosts, WorkerBroke
from train.graders.templates import Sample

Answering = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""The answer to a job's question, given the job's id and the question."""

ANSWER_WITHIN_S = 3600.0
"""How long a model that samples, judges or teaches may take; the job's devices stand still meanwhile. In mode `train` a
person may want exactly that for a while."""
SAY_AFTER_S = 30.0
"""After this long without an answer the job says that it waits."""
SAY_AGAIN_S = 600.0
"""If every step waits so long, the job says it this often."""


class Saying:
    """Invariant: for each job `_waited` has what it last said about waiting, and since when; `_failed` what it last
    said about failures, and when the last one was."""

    def __init__(self, db: Database, asking: Asking, after_s: float = SAY_AFTER_S):
        self._db, self._asking, self._after_s = db, asking, after_s
        self._waited: dict[str, tuple[str, float]] = {}
        self._failed: dict[str, tuple[Hashable, float]] = {}

    @contextmanager
    def waiting(
        self, job_id: str, key_id: str | None, whom: str, model: str, busy: str = "its engines are busy"
    ) -> Iterator[None]:
        """Says that the job waits, and why, if this takes long. whom: the model in words. busy: why, where nothing
        keeps its requests from engines; empty: that is not worth a word."""
        timer = asyncio.get_running_loop().call_later(self._after_s, self._waits, job_id, key_id, whom, model, busy)
        try:
            yield
        finally:
            timer.cancel()

    def failed(self, job_id: str, text: str, kind: Hashable = None) -> None:
        """Says it once, until nothing has failed for a while or something else does. kind: of what failed, where it is
        told in many words."""
        said, _ = self._failed.get(job_id, ("", 0.0))
        self._failed[job_id] = kind or text, time.monotonic()
        if said != (kind or text):
            add_message(self._db, job_id, text, level="warn")

    def nothing_failed(self, job_id: str) -> None:
        """Of a part of a step: the answers to some of its prompts are judged together."""
        _, failed_s = self._failed.get(job_id, ("", 0.0))
        if time.monotonic() - failed_s >= SAY_AGAIN_S:
            self._failed.pop(job_id, None)

    def _waits(self, job_id: str, key_id: str | None, whom: str, model: str, busy: str) -> None:
        if not (why := self._asking.why(key_id, model) or busy):
            return
        text = f"the job waits for its {whom}, up to {ANSWER_WITHIN_S / 60:.0f} minutes: {why}"
        said, at_s = self._waited.get(job_id, ("", 0.0))
        if said != text or time.monotonic() - at_s > SAY_AGAIN_S:
            self._waited[job_id] = text, time.monotonic()
            add_message(self._db, job_id, text, level="warn")


MOST_REWARD = 1e9
"""The largest reward: ranks learn in float32, where the squared gradients of larger rewards overflow and the loss
becomes NaN."""


class RolloutGrading:
    def __init__(self, db: Database, hosts: GraderHosts, answers: ModelAnswers, saying: Saying):
        self._db, self._hosts, self._answers, self._saying = db, hosts, answers, saying

    async def grade(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """{"rewards", "errors"} of the question's "samples", {"text", "tools"?, "item"}, in their order. The reward is
        None for a sample that the box could not grade or whose reward is beyond MOST_REWARD, and 0 where the grader
        failed. It is no error if an answer is not JSON although JSON is expected, or lacks an expected field: the model
        has to learn that. {"failed"}, in words, where the job cannot go on."""
        samples = question["samples"]
        row, found = jobs.find(self._db, job_id), job_records.find_judge(self._db, job_id)
        if row is None or found is None:
            return {"failed": "the grader of the job was deleted"}
        if how := keys.how_ended(self._db, row.key_id):
            return {"failed": f"the API key of the job {how}, and its answers are graded on behalf of it"}
        pairs = [(Sample(one["text"], one.get("tools", [])), one["item"]) for one in samples]

        async def ask(body: dict[str, Any]) -> ModelAnswer:
            with self._saying.waiting(job_id, row.key_id, f"judge {body['model']}", body["model"]):
                return await self._answers.ask(row.key_id, body, ANSWER_WITHIN_S)

        try:
            grader = parse(found.judge["grader"])
            results = await all_graded_with_answers(self._hosts, row.owner, grader, pairs, ask, waited_for=True)
        except WorkerBroke as error:
            return {"rewards": [None] * len(samples), "errors": [str(error)] * len(samples)}
        rewards, errors = [_reward(graded) for graded, _ in results], [_error(graded) for graded, _ in results]
        self._say_what_failed(job_id, [graded for graded, _ in results], rewards, errors)
        return {"rewards": rewards, "errors": errors}

    def _say_what_failed(
        self, job_id: str, graded: list[Graded], rewards: list[float | None], errors: list[str]
    ) -> None:
        """The job reports the first kind of failure that differs from its last report: a step's event has only their
        share."""
        first = next((place for place, why in enumerate(errors) if why), None)
        if first is None:
            self._saying.nothing_failed(job_id)
            return
        counts = "counts for nothing" if rewards[first] is None else "has the reward 0"
        flags = tuple(name for name, value in asdict(graded[first].errors).items() if value is True)
        text = f"the grader failed at {sum(map(bool, errors))} of {len(errors)} answers, of which the first {counts}"
        self._saying.failed(job_id, f"{text}: {errors[first]}", (rewards[first] is None, flags))


def _reward(graded: Graded) -> float | None:
    errors = graded.errors
    judges = errors.model_grader_server_error or errors.model_grader_parse_error or errors.model_grader_refusal_error
    ours = judges or errors.python_grader_server_error or errors.other_error
    return None if ours or abs(graded.reward) > MOST_REWARD else graded.reward


def _error(graded: Graded) -> str:
    if abs(graded.reward) > MOST_REWARD:
        return f"the reward is {graded.reward:g}: a model can learn from rewards within ±{MOST_REWARD:,.0f}"
    return "" if graded.errors.of_the_answer else "; ".join(graded.messages)


class _EnginesDied(str):
    """The gateway's message of a request of which two engines died."""


class Teaching:
    def __init__(self, db: Database, answers: ModelAnswers, saying: Saying):
        self._db, self._answers, self._saying = db, answers, saying

    async def teach(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """Asks the teacher about each of the question's "samples": {"tokens", "answer": how many of the last tokens are
        the answer}.

        Returns {"log_probs", "errors"}, both in the order of the samples: the teacher's log-probability of each token
        of the answer, or None with the reason in "errors". If the job cannot go on, returns {"failed": why}."""
        row, found = jobs.find(self._db, job_id), job_records.find_judge(self._db, job_id)
        if row is None or found is None:
            return {"failed": "the teacher of the job is not known any more"}
        if how := keys.how_ended(self._db, row.key_id):
            return {"failed": f"the API key of the job {how}, and its teacher is asked on behalf of it"}
        teacher = found.judge["teacher"]
        versions = set[str]()
        with self._saying.waiting(job_id, row.key_id, f"teacher {teacher}", teacher):
            asking = (self._asked(row.key_id, teacher, one, versions) for one in question["samples"])
            answers = await asyncio.gather(*asking)
        if versions.difference(found.taught_by):
            job_records.taught(self._db, job_id, versions)
        errors = [one if isinstance(one, str) else "" for one in answers]
        if fatal := next((one for one in answers if isinstance(one, _EnginesDied)), ""):
            # The same sample would make an engine die again in each step, and others would lose their requests with it.
            return {"failed": f"an answer of the student cannot be shown to its teacher {teacher}: {fatal}"}
        if counted := Counter(filter(None, errors)):
            ((why, _),) = counted.most_common(1)
            message = f"nothing is learnt of some answers, of which the teacher {teacher} told nothing: {why}"
            self._saying.failed(job_id, message)
        else:
            self._saying.nothing_failed(job_id)
        return {"log_probs": [None if isinstance(one, str) else one for one in answers], "errors": errors}

    async def _asked(
        self, key_id: str | None, teacher: str, sample: dict[str, Any], versions: set[str]
    ) -> list[float] | str:
        """Returns the log-probabilities, or why there are none. Adds the version that answered to `versions`."""
        tokens = sample["tokens"]
        answer = await self._answers.answer(key_id, scoring.URL, scoring.request(teacher, tokens), ANSWER_WITHIN_S)
        if isinstance(answer, str):
            return answer
        if answer.status != 200:
            error = answer.body.get("error") or {} if isinstance(answer.body, dict) else {}
            message = str(error.get("message") or f"its engine answered with status {answer.status}")
            return _EnginesDied(message) if error.get("code") == ENGINES_DIED else message
        try:
            found = scoring.read(answer.body, tokens, sample["answer"])
        except ValueError as error:
            return f"the teacher gave {error}"
        if answer.version:
            versions.add(answer.version)
        return found
