"""Grades samples: the judges of their grader are asked through the gateway, the rest is computed in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from appliance.controller.bus.asking import Asking
from appliance.store.database import Database
from appliance.store.records import keys
from train.graders.errors import GradingErrors
from train.graders.graders import Grader, ModelAnswer, judges
from train.graders.grading import Graded, requests
from train.graders.hosts import GraderHosts, WorkerBroke
from train.graders.templates import Sample

Judged = dict[str, tuple[dict[str, Any], ModelAnswer]]
"""By the name of a judge, the body of the chat completion that it was sent, and its answer."""


class Grading:
    def __init__(self, db: Database, hosts: GraderHosts, asking: Asking):
        self._db, self._hosts, self._asking = db, hosts, asking

    async def chat(self, key_id: str | None, body: dict[str, Any], within_s: float | None = None) -> ModelAnswer:
        """A model's answer to a chat completion, asked on behalf of this key, or in `error` why there is none."""
        model = str(body["model"])
        answer = await self._asking.ask(key_id, model, "/v1/chat/completions", body, within_s=within_s)
        if answer.error:
            return ModelAnswer(model=model, error=answer.error)
        choice, used = answer.body["choices"][0], answer.body.get("usage") or {}
        message = choice["message"]
        return ModelAnswer(
            message.get("content") or "",
            model,
            int(used.get("prompt_tokens") or 0),
            int(used.get("completion_tokens") or 0),
            int((used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            refused=bool(message.get("refusal")),
            tools=message.get("tool_calls") or [],
            finish_reason=str(choice.get("finish_reason") or ""),
        )

    async def ask_judges(
        self, key_id: str | None, grader: Grader, sample: Sample, item: Any, within_s: float | None = None
    ) -> Judged:
        """Ask the models of a grader about a sample on behalf of this key. within_s: time that each has."""
        bodies = await asyncio.to_thread(requests, grader, sample, item) if judges(grader) else {}
        answers = await asyncio.gather(*(self.chat(key_id, body, within_s) for body in bodies.values()))
        return dict(zip(bodies, zip(bodies.values(), answers, strict=True), strict=True))

    async def grade(
        self,
        key_id: str | None,
        grader: Grader,
        samples: Sequence[tuple[Sample, Any]],
        judged: Sequence[Judged],
        waited_for: bool = False,
    ) -> list[Graded]:
        """Rewards of samples with their items, 0 with flags where there is none.

        Args:
            judged: of each sample, from `ask_judges`.
            waited_for: as `GraderHosts.grade` has it.
        """
        owner = keys.owner_of(self._db, key_id or "")
        answers = [{name: answer for name, (_, answer) in one.items()} for one in judged]
        try:
            return await self._hosts.grade(owner, grader, samples, answers, waited_for)
        except WorkerBroke as error:
            broke = Graded(0.0, False, errors=GradingErrors(other_error=True), messages=[str(error)], was_run=False)
            return [broke] * len(samples)
