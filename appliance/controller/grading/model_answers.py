"""Asks models of the box on behalf of a key if a grader needs their answer, or an evaluation a sample."""

from __future__ import annotations

import asyncio
from typing import Any

from appliance.controller.bus.asking import Asker, Asking
from appliance.controller.interfaces.records import EngineAnswer
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.records import keys
from train.graders.grading import ModelAnswer
from weights.format.names import policy_of

URL = "/v1/chat/completions"


class ModelAnswers:
    def __init__(self, db: Database, asking: Asking):
        self._db, self._asking = db, asking

    async def ask(self, key_id: str | None, body: dict[str, Any], within_s: float) -> ModelAnswer:
        """The answer to a conversation, or in `error` why there is none within this time; never raises for a model's
        fault or a limit. key_id: None for the box itself, which has no limits."""
        model = str(body["model"])
        answer = await self.answer(key_id, URL, body, within_s)
        return ModelAnswer(model=model, error=answer) if isinstance(answer, str) else _read(model, answer)

    async def answer(
        self, key_id: str | None, url: str, body: dict[str, Any], within_s: float, *, sequences: int = 1
    ) -> EngineAnswer | str:
        """Like `ask`, for any route: what an engine answers, or why none does. sequences: that are asked for."""
        model, asking = str(body["model"]), self._asking
        if policy_of(model) is not None:
            model = model.partition("@")[0]
        asker = Asker(key_id, keys.owner_of(self._db, key_id) if key_id is not None else "")

        async def given() -> dict[str, Any]:
            return body

        try:
            async with asyncio.timeout(within_s):
                answer = await asking.ask(asker, model, url, given, new_id("req_"), sequences)
        except TimeoutError:
            return f"no answer within {within_s:.0f} s: {asking.why(key_id, model) or 'its engines are busy'}"
        if answer.status == 401 and (how := keys.how_ended(self._db, key_id)):
            return f"the key that asks {how}"
        return answer


def _read(model: str, answer: EngineAnswer) -> ModelAnswer:
    body = answer.body if isinstance(answer.body, dict) else {}
    if answer.status != 200:
        message = (body.get("error") or {}).get("message") or f"status {answer.status}"
        return ModelAnswer(model=model, error=str(message))
    choice, used = body["choices"][0], body.get("usage") or {}
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
