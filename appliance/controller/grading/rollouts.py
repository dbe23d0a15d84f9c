"""Grades what a reinforcement job's model answers while it trains, by the job's grader and on behalf of its key."""

from __future__ import annotations

from functools import partial
from typing import Any

from appliance.controller.context.context import ControllerContext
from appliance.controller.grading.judged import all_graded_with_answers
from appliance.controller.grading.model_answers import ModelAnswers
from appliance.store.objects import job_records, jobs
from appliance.store.records import keys
from train.graders.graders import parse
from train.graders.grading import Graded
from train.graders.host import WorkerBroke
from train.graders.hosts import GraderHosts
from train.graders.templates import Sample

ANSWER_WITHIN_S = 300.0
"""How long a judge may take; the job's devices stand still meanwhile."""
MOST_REWARD = 1e9
"""The largest reward: ranks learn in float32, where the squares of gradients from larger ones overflow and the loss is
no number any more."""


class RolloutGrading:
    def __init__(self, context: ControllerContext, hosts: GraderHosts, answers: ModelAnswers):
        self._db, self._hosts, self._answers = context.db, hosts, answers

    async def grade(self, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
        """{"rewards", "errors"} of the question's "samples", {"text", "tools"?, "item"}, in their order. One that the
        box could not grade, or whose reward is beyond MOST_REWARD, has None; one that the grader failed at has 0. An
        answer that is not JSON where JSON is read, or lacks what is read of it, is no error, but what the model has to
        learn. {"failed"}, in words, where the job cannot go on."""
        samples = question["samples"]
        row, found = jobs.find(self._db, job_id), job_records.find_judge(self._db, job_id)
        if row is None or found is None:
            return {"failed": "the grader of the job was deleted"}
        if keys.is_revoked(self._db, row.key_id):
            return {"failed": "the API key of the job was revoked, and its answers are graded on behalf of it"}
        asked = [(Sample(one["text"], one.get("tools", [])), one["item"]) for one in samples]
        ask = partial(self._answers.ask, row.key_id, within_s=ANSWER_WITHIN_S)
        try:
            grader = parse(found.judge["grader"])
            told = await all_graded_with_answers(self._hosts, row.owner, grader, asked, ask, waited_for=True)
        except WorkerBroke as error:
            return {"rewards": [None] * len(samples), "errors": [str(error)] * len(samples)}
        return {
            "rewards": [_reward(graded) for graded, _ in told],
            "errors": [_error(graded) for graded, _ in told],
        }


def _reward(graded: Graded) -> float | None:
    errors = graded.errors
    judges = errors.model_grader_server_error or errors.model_grader_parse_error or errors.model_grader_refusal_error
    ours = judges or errors.python_grader_server_error or errors.other_error
    return None if ours or abs(graded.reward) > MOST_REWARD else graded.reward


def _error(graded: Graded) -> str:
    if abs(graded.reward) > MOST_REWARD:
        return f"the reward is {graded.reward:g}: a model can learn from rewards within ±{MOST_REWARD:,.0f}"
    return "" if graded.errors.of_the_answer else "; ".join(graded.messages)
