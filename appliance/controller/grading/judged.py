"""Grades samples, with the answers of models that their grader asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from train.graders.graders import Grader, judges
from train.graders.grading import Graded, ModelAnswer, requests
from train.graders.hosts import GraderHosts
from train.graders.templates import Sample

Ask = Callable[[dict[str, Any]], Awaitable[ModelAnswer]]
"""The answer to the body of a chat completion."""


async def graded_with_answers(
    hosts: GraderHosts, owner: str, grader: Grader, sample: tuple[Sample, Any], ask: Ask
) -> tuple[Graded, list[ModelAnswer]]:
    """The sample's reward, and the models' answers, in the order of its graders. sample: with its item. No turn is
    held while models are asked. Raises WorkerBroke."""
    ((graded, answers),) = await all_graded_with_answers(hosts, owner, grader, [sample], ask)
    return graded, answers


async def all_graded_with_answers(
    hosts: GraderHosts,
    owner: str,
    grader: Grader,
    samples: Sequence[tuple[Sample, Any]],
    ask: Ask,
    waited_for: bool = False,
) -> list[tuple[Graded, list[ModelAnswer]]]:
    """`graded_with_answers` for each of the samples; models are asked for all of them at once, which counts as time of
    execution. waited_for: as `GraderHosts.grade` has it."""
    asked: list[dict[str, dict[str, Any]]] = [{} for _ in samples]
    if judges(grader):
        asked = [await asyncio.to_thread(requests, grader, *sample) for sample in samples]

    async def timed(body: dict[str, Any]) -> tuple[ModelAnswer, float]:
        began_s = time.perf_counter()
        return await ask(body), time.perf_counter() - began_s

    answers = iter(await asyncio.gather(*(timed(body) for one in asked for body in one.values())))
    both = [{name: next(answers) for name in one} for one in asked]
    by_sample = [{name: answer for name, (answer, _) in one.items()} for one in both]
    took_s = [max((seconds for _, seconds in one.values()), default=0.0) for one in both]
    graded = await hosts.grade(owner, grader, samples, by_sample, waited_for)
    return [
        (replace(one, execution_s=one.execution_s + seconds), [*given.values()])
        for one, given, seconds in zip(graded, by_sample, took_s, strict=True)
    ]
