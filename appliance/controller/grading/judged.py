"""Grades one sample, with the answers of models that its grader asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from train.graders.graders import Grader, judges
from train.graders.grading import Graded, ModelAnswer
from train.graders.hosts import GraderHosts
from train.graders.templates import Sample

Ask = Callable[[dict[str, Any]], Awaitable[ModelAnswer]]
"""The answer to the body of a chat completion."""


async def graded_with_answers(
    hosts: GraderHosts, owner: str, grader: Grader, sample: tuple[Sample, Any], ask: Ask
) -> tuple[Graded, list[ModelAnswer]]:
    """Its reward, and what models have answered, in the order of its graders. sample: with its item.

    No worker is held while models are asked. Raises WorkerBroke, before any is asked."""
    asked: dict[str, dict[str, Any]] = {}
    if judges(grader):
        async with hosts.of(owner) as host:
            (asked,) = await host.requests(grader, [sample])
    told = await asyncio.gather(*map(ask, asked.values()))
    async with hosts.of(owner) as host:
        (graded,) = await host.grade(grader, [sample], [dict(zip(asked, told, strict=True))])
    return graded, told
