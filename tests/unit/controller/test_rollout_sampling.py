"""Answers of a model in training: asked of engines through the gateway, on behalf of the job's key, and judged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.controller.grading.rollouts import Rollouts
from appliance.controller.interfaces.records import EngineAnswer
from tests.simulator.control_plane import rollouts_of
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_jobs import prompts, rewarded
from train.graders.grading import Graded
from train.graders.hosts import GraderHosts
from weights.format.names import policy_name

QUESTION = {
    "kind": "sample",
    "policy": {"name": policy_name("ftjob-1"), "version": "step-3.ab"},
    "base": {"model": "starter", "version": "v1"},
    "tokens": [1, 2],
    "n": 9,
    "seed": 100,
    "room": 4,
    "ends": [2],
    "item": {"answer": "x"},
    "tools": False,
}


class Routing:
    def __init__(self) -> None:
        self.offered: list[tuple[str, str, str]] = []

    async def offer_policy(self, *policy: str) -> None:
        self.offered.append(policy)


async def written(body: dict[str, Any]) -> EngineAnswer:
    """Answer i is the token 10 + its seed's distance from the first, and a text of as many letters."""
    numbers = [body["seed"] - 100 + i for i in range(body["n"])]
    choices = [
        {"index": i, "token_ids": [10 + number], "logprobs": {"token_logprobs": [-1.0]}, "text": "a" * number}
        for i, number in enumerate(numbers)
    ]
    return EngineAnswer(200, {"choices": choices[::-1]})


@pytest.fixture
def routing() -> Routing:
    return Routing()


@pytest.fixture
def sampling(control: Control, routing: Routing) -> Rollouts:
    return rollouts_of(control.context, routing)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Texts of each call that grades; the reward is their length."""
    calls = list[list[str]]()

    async def grade(hosts: Any, owner: str, grader: Any, samples: list[Any], *rest: Any) -> list[Graded]:
        calls.append([sample.output_text for sample, _ in samples])
        await asyncio.sleep(0.01)
        return [Graded(len(sample.output_text), True) for sample, _ in samples]

    monkeypatch.setattr(GraderHosts, "grade", grade)
    return calls


async def test_prompt_is_sampled_by_one_version_and_judged_in_the_order_of_its_answers(
    control, sampling, routing, judged
):
    job_id = await control.job(training_file=await control.upload(prompts()), method=rewarded())
    control.engines.rule = written
    found = await sampling.sample(job_id, QUESTION | {"judge": "grade"})
    assert found["ids"] == [[10 + number] for number in range(9)] and found["log_probs"] == [[-1.0]] * 9
    assert {body["model"] for body in control.engines.sent} == {policy_name("ftjob-1") + "@step-3.ab"}
    assert sorted((body["seed"], body["n"]) for body in control.engines.sent) == [(100, 8), (108, 1)]
    assert routing.offered == [(policy_name("ftjob-1"), "starter", "v1")]
    assert judged == [["a" * number for number in range(9)]]
    assert found["verdict"] == {"rewards": list(range(9)), "errors": [""] * 9}


async def test_answer_that_no_engine_gives_fails_the_step_in_words(control, sampling):
    job_id = await control.job()

    async def refused(body: dict[str, Any]) -> EngineAnswer:
        return EngineAnswer(400, {"error": {"message": "too long"}})

    control.engines.rule = refused
    found = await sampling.sample(job_id, QUESTION | {"judge": "grade"})
    assert found.keys() == {"failed"} and "too long" in found["failed"]
    assert (await sampling.sample("ftjob-gone", QUESTION | {"judge": "grade"})).keys() == {"failed"}
