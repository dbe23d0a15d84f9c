"""Answers of a job's model in training: sampled by engines of its base through the gateway, and judged at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.grading.questions import ANSWER_WITHIN_S, Answering, Saying
from appliance.store.database import Database
from appliance.store.objects import jobs
from serve.core import sampling
from train.graders.calls import calls_in


class RolloutSampling:
    """judges: by the kind of question that ranks ask about their own samples."""

    def __init__(
        self, db: Database, routing: BusRouting, answers: ModelAnswers, saying: Saying, judges: Mapping[str, Answering]
    ):
        self._db, self._routing, self._answers, self._saying, self._judges = db, routing, answers, saying, judges

    async def sample(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """{"ids", "log_probs", "verdict"} of the answers to one prompt, a question of train.rollouts.engine_samples;
        {"failed"}, in words, where the job cannot go on."""
        policy, base, n, room = question["policy"], question["base"], question["n"], question["room"]
        row = jobs.find(self._db, job_id)
        if row is None:
            return {"failed": "the job was deleted"}
        await self._routing.offer_policy(policy["name"], base["model"], base["version"])
        each = sampling.answers_at_once(room)
        with self._saying.waiting(job_id, row.key_id, f"engine of {base['model']}", policy["name"], busy=""):
            parts = await asyncio.gather(
                *(self._asked(row.key_id, question, first, min(each, n - first)) for first in range(0, n, each))
            )
        if failed := next((part for part in parts if isinstance(part, str)), None):
            return {"failed": f"no engine of {base['model']} samples answers: {failed}"}
        made = [one for part in parts if not isinstance(part, str) for one in part]
        verdict = await self._judges[question["judge"]](job_id, {"samples": _to_judge(question, made)})
        if "failed" in verdict:
            return verdict
        return {"ids": [one.ids for one in made], "log_probs": [one.log_probs for one in made], "verdict": verdict}

    async def _asked(
        self, key_id: str | None, question: dict[str, Any], first: int, n: int
    ) -> list[sampling.Sampled] | str:
        """Answers `first` to `first + n` of the question, or why there are none."""
        body = sampling.request(
            f"{question['policy']['name']}@{question['policy']['version']}",
            question["tokens"],
            n=n,
            seed=question["seed"] + first,
            max_tokens=question["room"],
            ends=question["ends"],
        )
        answer = await self._answers.answer(key_id, sampling.URL, body, ANSWER_WITHIN_S, sequences=n)
        if isinstance(answer, str):
            return answer
        if answer.status != 200:
            error = answer.body.get("error") or {} if isinstance(answer.body, dict) else {}
            return str(error.get("message") or f"an engine answered with status {answer.status}")
        try:
            return sampling.read(answer.body, n)
        except ValueError as error:
            return str(error)


def _to_judge(question: dict[str, Any], made: list[sampling.Sampled]) -> list[dict[str, Any]]:
    """What is asked about these answers: a grader reads their texts, a teacher their tokens."""
    if question["judge"] == "teach":
        return [{"tokens": [*question["tokens"], *one.ids], "answer": len(one.ids)} for one in made]
    return [
        {**(calls_in(one.text) if question["tools"] else {"text": one.text}), "item": question["item"]} for one in made
    ]
