"""Tells a job that distils how likely its teacher finds what it has answered: asked of an engine of the box on behalf
of the job's key, as graders ask models."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from appliance.controller.batches.retry import ended_engines
from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.controller.jobs.events import add_message
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from serve.core import scoring

ANSWER_WITHIN_S = 3600.0
"""How long a teacher may take; the job's devices stand still meanwhile. Whoever sets the mode `train` may want just
that for a while."""
SAY_AFTER_S = 30.0
"""How long it is without an answer before the job says that it waits."""


class Teaching:
    def __init__(self, context: ControllerContext, answers: ModelAnswers, say_after_s: float = SAY_AFTER_S):
        self._db, self._engines, self._answers = context.db, context.batch_engines, answers
        self._say_after_s = say_after_s
        self._said: dict[str, str] = {}  # by job, of those that something was said about

    async def teach(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """{"log_probs", "errors"} of the question's "samples", {"tokens", "answer": how many of the last ones}, in
        their order: of each token of an answer the log-probability to the teacher, or None and why. {"failed"}, in
        words, where the job cannot go on."""
        row, found = jobs.find(self._db, job_id), job_records.find_judge(self._db, job_id)
        if row is None or found is None:
            return {"failed": "the teacher of the job is not known any more"}
        if keys.is_revoked(self._db, row.key_id):
            return {"failed": "the API key of the job was revoked, and its teacher is asked on behalf of it"}
        teacher = found.judge["teacher"]
        versions = set[str]()
        waiting = asyncio.get_running_loop().call_later(self._say_after_s, self._say_that_it_waits, job_id, teacher)
        try:
            asked = (self._asked(row.key_id, teacher, one, versions) for one in question["samples"])
            told = await asyncio.gather(*asked)
        finally:
            waiting.cancel()
        if versions.difference(found.taught_by):
            job_records.taught(self._db, job_id, versions)
        errors = [one if isinstance(one, str) else "" for one in told]
        if fatal := next(filter(ended_engines, errors), ""):
            # What ends an engine comes again with each step, and others' requests end with it.
            return {"failed": f"an answer of the student cannot be shown to its teacher {teacher}: {fatal}"}
        if counted := Counter(filter(None, errors)):
            ((why, _),) = counted.most_common(1)
            self._say(job_id, f"nothing is learnt of some answers, of which the teacher {teacher} told nothing: {why}")
        else:
            self._said.pop(job_id, None)
        return {"log_probs": [None if isinstance(one, str) else one for one in told], "errors": errors}

    async def _asked(
        self, key_id: str | None, teacher: str, sample: dict[str, Any], versions: set[str]
    ) -> list[float] | str:
        """What the teacher answers, or why there is no answer. Adds the version that answered to `versions`."""
        tokens = sample["tokens"]
        answer = await self._answers.answer(key_id, scoring.URL, scoring.request(teacher, tokens), ANSWER_WITHIN_S)
        if isinstance(answer, str):
            return answer
        if answer.status != 200:
            return _message(answer)
        try:
            found = scoring.read(answer.body, tokens, sample["answer"])
        except ValueError as error:
            return f"the teacher gave {error}"
        if answer.version:
            versions.add(answer.version)
        return found

    def _say_that_it_waits(self, job_id: str, teacher: str) -> None:
        why = self._engines.room(teacher).why or "its engines are busy"
        self._say(job_id, f"the job waits for its teacher {teacher}, up to {ANSWER_WITHIN_S / 60:.0f} minutes: {why}")

    def _say(self, job_id: str, text: str) -> None:
        """Says it once, until there is something else to say."""
        if self._said.get(job_id) != text:
            self._said[job_id] = text
            add_message(self._db, job_id, text, level="warn")


def _message(answer: EngineAnswer) -> str:
    body = answer.body if isinstance(answer.body, dict) else {}
    return str((body.get("error") or {}).get("message") or f"its engine answered with status {answer.status}")
