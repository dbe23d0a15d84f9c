"""Grades what a reinforcement job's model answers while it trains, by the job's grader and on behalf of its key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from appliance.controller.grading.judged import all_graded_with_answers
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.controller.grading.saying import ANSWER_WITHIN_S, Saying
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from train.graders.graders import parse
from train.graders.grading import Graded, ModelAnswer
from train.graders.hosts import GraderHosts, WorkerBroke
from train.graders.templates import Sample

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
            with self._saying.waiting(job_id, row.key_id, "judge", body["model"]):
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
