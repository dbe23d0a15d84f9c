"""Tells a distillation job how likely its teacher finds its answers. It asks an engine of the box on behalf of the
job's key, as graders ask models."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.grading.saying import ANSWER_WITHIN_S, Saying
from appliance.gateway.core.errors import ENGINES_DIED
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from serve.core import scoring


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
        with self._saying.waiting(job_id, row.key_id, "teacher", teacher):
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
