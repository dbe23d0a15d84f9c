"""Answers of a job's model in training: sampled by engines of its base through the gateway, where the ranks have not
sampled them, and judged."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.controller.engines import sampling
from appliance.controller.engines.routing_table import BusRouting
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.grading.questions import ANSWER_WITHIN_S, Answering, Saying
from appliance.store.database import Database
from appliance.store.objects import jobs
from train.graders.calls import calls_in


@dataclass(slots=True, eq=False)
class _Unjudged:
    """Samples, as a judge is asked about them."""

    samples: list[dict[str, Any]]
    verdict: dict[str, Any] | None = None


@dataclass(slots=True)
class _Judging:
    """A job's samples that wait for its judge. turn: held while the judge is asked."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: list[_Unjudged] = field(default_factory=list)


class RolloutSampling:
    """judges: those of jobs, by the name that their ranks have for them."""

    def __init__(
        self, db: Database, routing: BusRouting, answers: ModelAnswers, saying: Saying, judges: Mapping[str, Answering]
    ):
        self._db, self._routing, self._answers, self._saying, self._judges = db, routing, answers, saying, judges
        self._judging: defaultdict[str, _Judging] = defaultdict(_Judging)  # by job

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
        asked = question | {"ids": [one.ids for one in made], "texts": [one.text for one in made]}
        return {"ids": asked["ids"], "log_probs": [one.log_probs for one in made], **await self.judge(job_id, asked)}

    async def judge(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """{"verdict"} on the "ids" and "texts" of answers to one prompt, in order, or {"failed"}, in words, where
        the job cannot go on."""
        verdict = await self._judged(job_id, question["judge"], _to_judge(question))
        return verdict if "failed" in verdict else {"verdict": verdict}

    async def _judged(self, job_id: str, kind: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The judge's answer about these samples. It is asked about all that wait for it at once: grading has a process
        for each call."""
        judging, mine = self._judging[job_id], _Unjudged(samples)
        judging.waiting.append(mine)
        try:
            async with judging.turn:
                if mine.verdict is None:
                    together = [one for one in judging.waiting if one.verdict is None]
                    asked = [sample for one in together for sample in one.samples]
                    found = await self._judges[kind](job_id, {"samples": asked})
                    start = 0
                    for one in together:
                        part = slice(start, start + len(one.samples))
                        one.verdict = found if "failed" in found else {name: of[part] for name, of in found.items()}
                        start = part.stop
                assert mine.verdict is not None
                return mine.verdict
        finally:  # also where its ranks have ended
            judging.waiting.remove(mine)
            if not judging.waiting:
                self._judging.pop(job_id, None)

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


def _to_judge(question: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked about its answers: a grader reads their texts, a teacher their tokens."""
    if question["judge"] == "teach":
        return [{"tokens": [*question["tokens"], *ids], "answer": len(ids)} for ids in question["ids"]]
    return [
        {**(calls_in(text) if question["tools"] else {"text": text}), "item": question["item"]}
        for text in question["texts"]
    ]
