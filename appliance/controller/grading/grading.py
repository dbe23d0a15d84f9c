"""Grades samples: the judges of their grader are asked through the gateway, the rest is computed in another process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from appliance.controller.bus.asking import Asking
from appliance.store.database import Database
from appliance.store.records import keys
from train.graders.errors import GradingErrors
from train.graders.graders import Grader, judges, sources
from train.graders.grading import Graded, ModelAnswer, requests
from train.graders.hosts import MOST_TIMEOUTS, GraderHosts, WorkerBroke
from train.graders.templates import Sample

MOST_TOGETHER = 64
"""Samples of one call, where no job waits for them."""
Judged = list[tuple[dict[str, Any], ModelAnswer]]
"""Bodies of chat completions to judges, with their answers."""


@dataclass(slots=True, eq=False)
class _Waiting:
    sample: Sample
    item: Any
    answers: dict[str, ModelAnswer]
    graded: Graded | None = None


class Grading:
    """Samples of one group that come while others of it are graded are graded in one call: each has a process of its
    own."""

    def __init__(self, db: Database, hosts: GraderHosts, asking: Asking):
        self._db, self._hosts, self._asking = db, hosts, asking
        self._groups: defaultdict[str, list[_Waiting]] = defaultdict(list)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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

    async def grade(
        self,
        key_id: str | None,
        grader: Grader,
        sample: Sample,
        item: Any,
        *,
        group: str,
        within_s: float | None = None,
        waited_for: bool = False,
    ) -> tuple[Graded, Judged]:
        """The sample's reward, 0 with flags where there is none, and what judges were asked and answered.

        Args:
            key_id: on behalf of which judges are asked.
            group: of samples with the same key and grader.
            within_s: time that a judge has.
            waited_for: as `GraderHosts.grade` has it.
        """
        bodies = await asyncio.to_thread(requests, grader, sample, item) if judges(grader) else {}
        answers = await asyncio.gather(*(self.chat(key_id, body, within_s) for body in bodies.values()))
        waiting, mine = self._groups[group], _Waiting(sample, item, dict(zip(bodies, answers, strict=True)))
        waiting.append(mine)
        try:
            async with self._turns.setdefault(group, asyncio.Lock()):
                if mine.graded is None:
                    await asyncio.sleep(0)  # for others that come together with it
                    # Code may take minutes for a sample: jobs grade in between, and no call gives up the rest of it.
                    most = MOST_TIMEOUTS if sources(grader) else MOST_TOGETHER
                    together = [one for one in waiting if one.graded is None][: None if waited_for else most]
                    await self._grade(keys.owner_of(self._db, key_id or ""), grader, together, waited_for)
                assert mine.graded is not None
                return mine.graded, list(zip(bodies.values(), answers, strict=True))
        finally:
            waiting.remove(mine)
            if not waiting:
                self._groups.pop(group, None)

    async def _grade(self, owner: str, grader: Grader, together: list[_Waiting], waited_for: bool) -> None:
        pairs, answers = [(one.sample, one.item) for one in together], [one.answers for one in together]
        try:
            graded = await self._hosts.grade(owner, grader, pairs, answers, waited_for)
        except WorkerBroke as error:
            broke = Graded(0.0, False, errors=GradingErrors(other_error=True), messages=[str(error)], was_run=False)
            graded = [broke] * len(together)
        for one, of in zip(together, graded, strict=True):
            one.graded = of
