"""Asks models of the box on behalf of a key if a grader needs their answer. Such questions are handled like lines of
batches: on capacity that interactive requests leave idle, owners taking turns, checked and paid for in the same way."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import orjson

from appliance.controller.access.model_access import why_not_asked
from appliance.controller.batches import share
from appliance.controller.batches.metering import BYTES_PER_TOKEN, Charge, Metering, Sent, most_of
from appliance.controller.batches.retry import Deaths, last_words
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.ports import EngineAnswer, LineReturned
from appliance.controller.responses.items import salted
from appliance.store.ids import new_id
from appliance.store.records import keys
from appliance.store.rows import KeyRow
from train.graders.grading import ModelAnswer

URL = "/v1/chat/completions"
ASKER = "graders"
LOOK_EVERY_S = 0.5
REFUSED_EVERY_S = 4.0
"""How often a question that waits for an engine, or is at one, is checked: whether it may still be asked. Checking each
one at every change, as waiting ones do for free capacity, took the loop 70 ms for 384 questions, each with its key and
its model."""
LIMITED_EVERY_S = 0.5
"""After a key's limits have held one of its questions back, they are not asked about its other ones until this time has
passed; then in the order in which those came. Otherwise 384 questions of one key without requests left in its minute
took the loop 70 ms at every change."""
MAX_OF_A_KEY = 16
"""Questions of one key to one model at the same time: each one that waits for an engine looks again at every change,
and a run may ask 256 questions at once."""


class ModelAnswers:
    """Invariant: every model in `_asking` has at least one request that waits or is at an engine."""

    def __init__(self, context: ControllerContext, metering: Metering):
        self._context, self._db = context, context.db
        self._metering = metering
        self._asking: Counter[str] = Counter()
        # By the model whose engines they are at or wait for: owners of the questions at engines; and for those that
        # wait, their keys with the owners.
        self._flying: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._waiting: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._last_sent: dict[str, int] = {}
        self._turns: WeakValueDictionary[tuple[str | None, str], asyncio.Semaphore] = WeakValueDictionary()
        self._held_until_s: dict[str, float] = {}  # keys whose limits held a question back, on the monotonic clock

    async def ask(self, key_id: str | None, body: dict[str, Any], within_s: float) -> ModelAnswer:
        """The answer to a conversation, or in `error` why there is none within this time; never raises for a model's
        fault or a limit. key_id: None for the box itself, which has no limits."""
        model = str(body["model"])
        answer = await self.answer(key_id, URL, body, within_s)
        return ModelAnswer(model=model, error=answer) if isinstance(answer, str) else _read(model, answer)

    async def answer(self, key_id: str | None, url: str, body: dict[str, Any], within_s: float) -> EngineAnswer | str:
        """Like `ask`, for any route: what an engine answers, or why none does."""
        model = str(body["model"])
        self._asking[model] += 1
        self._tell_wants()
        try:
            async with asyncio.timeout(within_s), self._turn(key_id, model):
                return await self._asked(key_id, model, url, body, time.time() + within_s)
        except TimeoutError:
            why = self._context.batch_engines.room(model).why or "its engines are busy"
            return f"no answer within {within_s:.0f} s: {why}"
        finally:
            self._asking -= Counter([model])
            if not self._asking:
                self._held_until_s.clear()
                self._last_sent.clear()
                self._flying.clear()
                self._waiting.clear()
            self._tell_wants()

    def _turn(self, key_id: str | None, model: str) -> asyncio.Semaphore:
        return self._turns.setdefault((key_id, model), asyncio.Semaphore(MAX_OF_A_KEY))

    async def _asked(
        self, key_id: str | None, model: str, url: str, body: dict[str, Any], expires_s: float
    ) -> EngineAnswer | str:
        question = new_id("req_")
        try:
            return await self._answered(question, key_id, model, url, body, expires_s)
        finally:
            self._metering.returned(key_id, question)

    async def _answered(
        self, question: str, key_id: str | None, model: str, url: str, body: dict[str, Any], expires_s: float
    ) -> EngineAnswer | str:
        deaths, size = Deaths(), len(orjson.dumps(body))
        tokens = size // BYTES_PER_TOKEN
        limits = partial(
            self._metering.waits_for, tokens=tokens, asker=question, asked=lambda: most_of(url, body, size)
        )
        while True:
            key = await self._place(key_id, model, url, limits, expires_s)
            if isinstance(key, str):
                return key
            owner = key.owner if key else ""
            sending = self._sent(key, model, url, salted(body, owner), deaths.goes_alone(question))
            with self._counted(self._flying, model, owner):
                self._last_sent[owner] = max(self._last_sent.values(), default=0) + 1
                task = asyncio.create_task(sending)
                if forbidden := await self._ended_while_allowed(task, partial(self._forbidden, key_id, model, url)):
                    return forbidden
            try:
                answer, sent = task.result()
            except LineReturned as error:
                self._metering.give_back(key, tokens)
                self._metering.returned(key_id, question)
                if error.yielded or deaths.counted(question):
                    continue
                return last_words(str(error))
            silent = sent if answer.silent else None
            self._metering.charge(key, model, [Charge("", answer, tokens, silent=silent)])
            return answer

    async def _place(
        self, key_id: str | None, model: str, url: str, limits: Callable[[KeyRow], str], expires_s: float
    ) -> KeyRow | None | str:
        """Waits until the question may go to an engine, and then charges its key's limits. Returns its key, or why it
        may not."""
        key = keys.find(self._db, key_id) if key_id is not None else None
        asker, asks_again_s = (key_id or "", key.owner if key else ""), 0.0
        with self._counted(self._waiting, model, asker):
            while True:
                now_s = time.monotonic()
                has_room = now_s >= self._held_until_s.get(asker[0], 0.0) and self._room(model, asker)
                if has_room or now_s >= asks_again_s:
                    # Not all at once.
                    asks_again_s = now_s + REFUSED_EVERY_S * random.uniform(0.5, 1.5)  # noqa: S311
                    key = keys.find(self._db, key_id) if key_id is not None else None
                    if refused := self._refused(key_id, key, model, url, expires_s):
                        return refused
                if has_room and not self._is_held(key, limits, now_s):
                    return key
                await self._context.batch_engines.changed(LOOK_EVERY_S)

    def _is_held(self, key: KeyRow | None, limits: Callable[[KeyRow], str], now_s: float) -> bool:
        """Whether its key's limits hold it back; charges them if not."""
        if key is None:
            return False
        if limits(key):
            self._held_until_s[key.id] = now_s + LIMITED_EVERY_S
            return True
        self._held_until_s.pop(key.id, None)
        return False

    def _refused(self, key_id: str | None, key: KeyRow | None, model: str, url: str, expires_s: float) -> str:
        if why := self._forbidden(key_id, model, url):
            return why
        refusal = self._metering.refusal(key, model, expires_s)
        return str(refusal.body["error"]["message"]) if refusal is not None else ""

    def _forbidden(self, key_id: str | None, model: str, url: str) -> str:
        if how := keys.how_ended(self._db, key_id):
            return f"the key that asks {how}"
        return why_not_asked(self._db, key_id, model, chats=url == URL)

    async def _ended_while_allowed(self, task: asyncio.Task[Any], forbidden: Callable[[], str]) -> str:
        """Returns when the question has ended; if it was stopped, why: its key may not ask this any more."""
        try:
            while not task.done():
                await asyncio.wait([task], timeout=REFUSED_EVERY_S * random.uniform(0.5, 1.5))  # noqa: S311
                if not task.done() and (why := forbidden()):
                    return why
            return ""
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])  # it pays

    def _room(self, model: str, asker: tuple[str, str]) -> bool:
        """Whether a question of this key and owner is among those whose turn it is."""
        engines = self._context.batch_engines
        host = engines.host(model)
        flying, waiting = self._flying[host], self._waiting[host]
        lines = engines.room(model).lines
        if len(waiting) < 2 and flying[asker[1]] == flying.total():  # nobody else's are there, or wait
            return lines > flying.total()
        wanting: Counter[str] = Counter()
        for (key_id, owner), number in waiting.items():
            if key_id == asker[0] or key_id not in self._held_until_s:
                wanting[owner] += number
        return share.slots(lines, wanting, flying, self._last_sent)[asker[1]] > 0

    @contextmanager
    def _counted(self, among: defaultdict[str, Counter[Any]], model: str, one: Any) -> Iterator[None]:
        host = self._context.batch_engines.host(model)
        among[host][one] += 1
        try:
            yield
        finally:
            among[host] -= Counter([one])

    async def _sent(
        self, key: KeyRow | None, model: str, url: str, body: dict[str, Any], alone: bool
    ) -> tuple[EngineAnswer, Sent]:
        """Raises LineReturned."""
        sent, engines = Sent(url, body, len(orjson.dumps(body))), self._context.batch_engines
        owner = key.owner if key else ""
        try:
            return await engines.send(model, url, body, new_id("req_"), owner=owner, alone=alone), sent
        except asyncio.CancelledError:
            # A caller who gives up pays for what was computed meanwhile.
            self._metering.pay(self._metering.left(key.id if key else "", model, [sent]))
            raise

    def _tell_wants(self) -> None:
        self._context.batch_engines.wants(list(self._asking), ASKER)


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
