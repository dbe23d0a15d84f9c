"""Runs background responses on engines like lines of batches, on capacity that interactive requests leave idle.

State that must outlive the controller is in the response's row: the request, while it is unfinished. After a restart
all unfinished ones are sent again. A response waits while its key's quota or per-minute limits are used up. It fails
after waiting a day, or after three engines died during it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from appliance.controller.access.model_access import may_use, unknown_model, viewer_of
from appliance.controller.batches import share
from appliance.controller.batches.followers import TOO_MANY, Followers, Held, followed_bytes
from appliance.controller.batches.metering import BYTES_PER_TOKEN, Charge, Metering, Sent, most_of
from appliance.controller.batches.retry import Deaths, last_words
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.ports import EngineAnswer, LineReturned
from appliance.controller.interfaces.principal import Principal
from appliance.controller.responses import objects
from appliance.controller.responses.items import items_of, salted
from appliance.controller.responses.stored import DAY_S, StoredResponses
from appliance.store.chunks import little_by_little
from appliance.store.ids import new_id
from appliance.store.objects import responses
from appliance.store.records import keys
from appliance.store.rows import UNFINISHED_RESPONSE, ResponseRow
from runtime.background_tasks import RunningTasks

log = logging.getLogger("appliance.controller")

URL = "/v1/responses"
ASKER = "background responses"
LOOK_EVERY_S = 0.5
COMMENT_EVERY_S = 15.0
_REVOKED_WITHIN_S = WRITTEN_WITHIN_S = 10.0
KEY_ENDED = "The API key of this response {}."


@dataclass(frozen=True, slots=True)
class _Claim:
    """Who asks for a response, and what it may cost: its estimated tokens are charged when it is sent, and the
    most that they may be counts while it is at an engine."""

    owner: str
    key_id: str
    tokens: int
    most: int
    expires_s: float

    @staticmethod
    def of(row: ResponseRow, request: dict[str, Any]) -> _Claim:
        tokens = _tokens(row)
        most = most_of(URL, request, tokens * BYTES_PER_TOKEN)
        return _Claim(row.owner, row.key_id, tokens, most, row.created_s + DAY_S)


class BackgroundResponses:
    """`start` begins with the stored responses; `begin` adds a new one. Invariant: an id is in `_waiting` or in
    `_flying`, or its response has ended, or is about to because its key was revoked."""

    def __init__(self, context: ControllerContext, stored: StoredResponses, metering: Metering):
        self._context, self._db, self._stored = context, context.db, stored
        self._metering = metering
        self._waiting: dict[str, str] = {}  # id -> model, in order of arrival
        self._flying: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._sent: dict[str, tuple[str, Sent]] = {}  # id -> (key id, line) of responses at an engine
        self._answered: set[str] = set()  # ids of those that are paid for and wait to be written
        self._claims: dict[str, _Claim] = {}  # of responses that wait or are at an engine
        self._last_sent: dict[str, int] = {}  # owner -> number of the last response sent, increasing
        self._unpaid: list[dict[str, Any]] = []
        self._deaths = Deaths()
        self._followers = Followers()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._ending = RunningTasks()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        for row in responses.unfinished(self._db):
            self._waits(row)
        self._task = self._context.background.keep("background responses", self._run)

    async def stop(self) -> None:
        """Write what engines have answered first: a second try would be charged again."""
        if self._task is not None:
            self._task.cancel()
        written = [task for one, (_, task) in self._flying.items() if one in self._answered]
        unanswered = [task for one, (_, task) in self._flying.items() if one not in self._answered]
        for task in unanswered:
            task.cancel()
        if written:
            await asyncio.wait(written, timeout=WRITTEN_WITHIN_S)
        for task in written:
            task.cancel()
        tasks = [*unanswered, *written, *([self._task] if self._task else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ending.stop()

    def _waits(self, row: ResponseRow) -> None:
        request = orjson.loads(row.request or "{}")
        self._waiting[row.id], self._claims[row.id] = request.get("model", ""), _Claim.of(row, request)

    def begin(self, row: ResponseRow) -> None:
        self._waits(row)
        self._tell_wants()
        self._wake.set()

    def forget(self, response_id: str) -> None:
        """The response was cancelled or deleted: stop the engine that works on it."""
        self._waiting.pop(response_id, None)
        _, task = self._flying.pop(response_id, ("", None))
        if (claim := self._claims.get(response_id)) is not None:
            self._metering.returned(claim.key_id, response_id)
        if task is not None:
            task.cancel()
        if (sent := self._sent.pop(response_id, None)) is not None:
            key_id, line = sent
            # Writes nothing: a key must be revocable on a full disk, too.
            self._unpaid += self._metering.left(key_id, line.body["model"], [line])
            self._wake.set()
        self._deaths.forget(response_id)
        self._claims.pop(response_id, None)
        self._tell_wants()

    def cancel(self, row: ResponseRow) -> ResponseRow:
        """Cancel it; returns the row afterwards. A response that has ended, even since the row was read, stays
        unchanged."""
        standing = responses.standing(self._db, row.id)
        if standing is not None and standing[0] in UNFINISHED_RESPONSE:
            self._end(row, {**orjson.loads(row.response), "status": "cancelled"})
            self.forget(row.id)
        return responses.find(self._db, row.id) or row

    def revoke(self, key_id: str) -> list[str]:
        """Stop what engines do for a revoked key; returns the ids of its responses. Call it in the transaction that
        revokes the key. Their rows fail afterwards, one by one: 200 rows of 1 MB held the loop for 4.5 s, and the
        gateways learnt only then that the key was revoked."""
        ids = responses.unfinished_ids(self._db, key_id=key_id)
        for response_id in ids:
            self.forget(response_id)
        if ids:
            self._ending.add(self._context.background.keep("responses of revoked keys", self._end_revoked))
        return ids

    async def revoked_ended(self) -> None:
        """Returns when the responses of revoked keys have failed, or if this takes long: on a full disk the writes are
        repeated until they succeed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REVOKED_WITHIN_S):
                await self._ending.idle()

    async def _end_revoked(self) -> None:
        left = iter(responses.unfinished_of_revoked(self._db))
        await little_by_little(lambda: self._end_next(left))

    def _end_next(self, left: Iterator[str]) -> bool:
        """False: none was left."""
        for response_id in left:
            row = responses.find(self._db, response_id)
            if row is not None and not row.finished:
                self.forget(response_id)
                self._fail(row, "invalid_prompt", KEY_ENDED.format(keys.how_ended(self._db, row.key_id)))
                return True
        return False

    def check_followers(self, caller: Principal, size: int) -> None:
        """Raises ApiError 429 if the followers that count for this caller's owner hold too much. size: bytes of the
        response."""
        self._followers.check(caller.owner, 2 * size)

    def follow(self, row: ResponseRow, after: int, caller: Principal) -> AsyncIterator[bytes]:
        """Events of its stream with numbers above `after`, until it has ended. Raises ApiError as `check_followers`."""
        return self._followers.enter(
            caller.owner, followed_bytes(row.response), lambda held: self._follow(row.id, after, caller.owner, held)
        )

    async def _follow(self, response_id: str, after: int, owner: str, held: Held) -> AsyncGenerator[bytes, None]:
        # Done on threads: all followers are told of its end in one turn of the loop, and each reads and writes it.
        db = self._db
        try:
            while (row := await db.read(owner, responses.find, db, response_id)) is not None:
                if not held.becomes(followed_bytes(row.response)):
                    yield objects.error_event(after + 1, TOO_MANY, self._followers.why(owner))
                    return
                sent_after = after
                events = objects.events(await db.read(owner, orjson.loads, row.response), sent_after)
                while (found := await db.read(owner, objects.next_event, events)) is not None:
                    after, event = found
                    yield event
                if after > sent_after:
                    continue  # it may have changed in the meantime
                if row.finished:
                    return
                standing = responses.standing(db, response_id)
                if standing is None or standing[0] != row.status:
                    continue  # it changed while a thread read it, before this task waited for changes
                if not await self._stored.news(response_id, COMMENT_EVERY_S):
                    yield b": waiting\n\n"
        finally:
            held.leave()

    def keep_house(self, now_s: float) -> None:
        """End responses that waited too long, or whose row was deleted with its key."""
        live = {claim.owner for claim in self._claims.values()}
        self._last_sent = {owner: number for owner, number in self._last_sent.items() if owner in live}
        for response_id in [*self._waiting, *self._flying]:
            if not responses.exists(self._db, response_id):
                self.forget(response_id)
            elif self._claims[response_id].expires_s < now_s:
                if (row := responses.find(self._db, response_id)) is not None:
                    self._fail(row, "server_error", "No engine had room for this response within 24 hours.")
                self.forget(response_id)

    # --- sending

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            unpaid, self._unpaid = self._unpaid, []
            self._metering.pay(unpaid)
            self._send_what_may_go()
            if self._waiting:
                await self._context.batch_engines.changed(LOOK_EVERY_S)
            else:
                await self._wake.wait()

    def _send_what_may_go(self) -> None:
        held: set[str] = set()  # ids of keys whose limits hold their responses back
        by_host: dict[str, list[str]] = {}  # the names that address a model's engines
        for model in dict.fromkeys(self._waiting.values()):
            by_host.setdefault(self._context.batch_engines.host(model), []).append(model)
        busy = dict[str, Counter[str]]()  # by host: owners of what is there
        for one, (model, _) in self._flying.items():
            busy.setdefault(self._context.batch_engines.host(model), Counter())[self._claims[one].owner] += 1
        for host, names in by_host.items():
            while self._send_some(names, busy.setdefault(host, Counter()), held):
                pass

    def _send_some(self, names: list[str], busy: Counter[str], held: set[str]) -> bool:
        """Fill the free capacity of a model's engines, which these names address. busy: owners of the work that is
        there. Returns True if limits of another key held back a response that was to go there, so that others may take
        its place."""
        # Batch lines share this room: one response may run beside them, or a long batch would block it for hours.
        lines = {name: self._context.batch_engines.room(name).lines for name in names}
        if max(lines.values()) <= busy.total() and len(busy) != 1:
            return False
        waiting = self._waiting.items()
        free = [one for one, model_name in waiting if lines.get(model_name) and self._claims[one].key_id not in held]
        wanting = Counter(self._claims[one].owner for one in free)
        given, held_before = share.slots(max(lines.values()), wanting, busy, self._last_sent), len(held)
        for response_id in free:
            claim, model = self._claims[response_id], self._waiting[response_id]
            if not given[claim.owner] or claim.key_id in held or not self._may_go(response_id, model, claim, held):
                continue
            given[claim.owner] -= 1
            self._last_sent[claim.owner] = max(self._last_sent.values(), default=0) + 1
            del self._waiting[response_id]
            task = asyncio.create_task(self._answer(response_id, model, claim.key_id), name=f"response {response_id}")
            self._flying[response_id] = (model, task)
            busy[claim.owner] += 1
        return len(held) > held_before

    def _may_go(self, response_id: str, model: str, claim: _Claim, held: set[str]) -> bool:
        """Whether its key's limits allow it now; charges them if so. It fails if they will not allow it in time; if it
        waits for them, its key is added to `held`."""
        key = keys.find(self._db, claim.key_id) if claim.key_id else None
        refusal = self._metering.refusal(key, model, claim.expires_s)
        if refusal is not None:
            row = responses.find(self._db, response_id)
            if row is not None:
                code = "rate_limit_exceeded" if refusal.status == 429 else "invalid_prompt"
                self._fail(row, code, str(refusal.body["error"]["message"]))
            self.forget(response_id)  # last: a write that fails on a full disk is repeated
            return False
        if self._metering.waits_for(key, claim.tokens, response_id, "", lambda: claim.most):
            held.add(claim.key_id)
            return False
        return True

    async def _answer(self, response_id: str, model: str, key_id: str) -> None:
        try:
            await self._asked_and_taken(response_id, model)
        finally:
            self._metering.returned(key_id, response_id)

    async def _asked_and_taken(self, response_id: str, model: str) -> None:
        async with self._in_turn():
            row = responses.find(self._db, response_id)
        if row is None:
            self.forget(response_id)
            return
        try:
            answer, sent = await self._asked(row, model)
        except LineReturned as error:
            self._metering.give_back(keys.find(self._db, row.key_id) if row.key_id else None, _tokens(row))
            if error.yielded or self._deaths.counted(response_id):
                self._flying.pop(response_id, None)
                first, last = {response_id: model}, self._waiting
                self._waiting = {**last, **first} if self._deaths.goes_alone(response_id) else {**first, **last}
                self._wake.set()
                return
            await self._ends(response_id, partial(self._fail, row, "server_error", last_words(str(error))))
        except ApiError as error:
            await self._ends(response_id, partial(self._fail, row, "invalid_prompt", error.message))
        except sqlite3.Error as error:
            log.warning("a response in background cannot be begun yet: %s", error)
            self._metering.give_back(keys.find(self._db, row.key_id) if row.key_id else None, _tokens(row))
            self._flying.pop(response_id, None)
            self._waiting[response_id] = model
            self._wake.set()
        except Exception as error:
            # A bug; without this the response would be in progress forever, with the reason only in a log.
            self._flying.pop(response_id, None)
            self._claims.pop(response_id, None)
            self._fail(row, "server_error", f"The response failed: {type(error).__name__}: {error}.")
            raise
        else:
            try:
                self._charge(row, model, answer, sent)
            except sqlite3.Error as error:
                log.warning("what a response in background has cost is written later: %s", error)
            self._answered.add(response_id)
            try:
                await self._ends(response_id, partial(self._take, row, answer))
            finally:
                self._answered.discard(response_id)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Around the work on one row, which may have 4 MB. Rows take turns, and the loop is free for as long in
        between: as many responses as engines have room for begin at once, and may end at once; 32 of them held the loop
        for 1.8 s."""
        async with self._turn:
            began_s = time.monotonic()
            yield
            await asyncio.sleep(time.monotonic() - began_s)

    async def _ends(self, response_id: str, end: Callable[[], None]) -> None:
        """Nothing happens if it is cancelled or deleted before its turn, because this task is cancelled, too. A write
        that fails on a full disk is repeated: without that, the response kept its place at an engine and was in
        progress for a day."""
        while not await self._has_ended(response_id, end):
            await asyncio.sleep(LOOK_EVERY_S)

    async def _has_ended(self, response_id: str, end: Callable[[], None]) -> bool:
        async with self._in_turn():
            flying = self._flying.pop(response_id, None)
            try:
                end()
            except sqlite3.Error as error:
                log.warning("the end of a response in background cannot be written yet: %s", error)
                if flying is not None:
                    self._flying[response_id] = flying
                return False
            self._deaths.forget(response_id)
            self._claims.pop(response_id, None)
            self._tell_wants()
            self._wake.set()
            return True

    async def _asked(self, row: ResponseRow, model: str) -> tuple[EngineAnswer, Sent]:
        """Raises LineReturned; ApiError where the earlier turns are gone."""
        if how := keys.how_ended(self._db, row.key_id):
            raise ApiError(401, KEY_ENDED.format(how))
        if not may_use(self._db, row.key_id or None, model):  # it was deleted, or is no longer shared
            raise unknown_model(model)
        before = None
        if row.previous_id is not None:
            viewer = viewer_of(self._db, row.key_id or None)
            earlier = await self._stored.before(row.previous_id, viewer)
            before = [item async for turn in self._stored.items(earlier, viewer) for item in turn.items]
        async with self._in_turn():
            # An older box has kept the input in the request, too.
            request = {"input": orjson.loads(row.input), **orjson.loads(row.request or "{}")}
            items = None if before is None else before + items_of(request["input"])
            self._set(row, {**orjson.loads(row.response), "status": "in_progress"}, status="in_progress")
            key = keys.find(self._db, row.key_id) if row.key_id else None
            body = salted(objects.engine_body(request, items), key.owner if key is not None else "")
            size = len(orjson.dumps(body))
        sent = Sent(URL, body, size)
        self._sent[row.id] = row.key_id, sent
        try:
            alone = self._deaths.goes_alone(row.id)
            engines = self._context.batch_engines
            return await engines.send(model, URL, body, new_id("req_"), owner=row.owner, alone=alone), sent
        finally:
            self._sent.pop(row.id, None)

    def _charge(self, row: ResponseRow, model: str, answer: EngineAnswer, sent: Sent) -> None:
        key = keys.find(self._db, row.key_id) if row.key_id else None
        silent = sent if answer.silent else None
        self._metering.charge(key, model, [Charge(row.id, answer, _tokens(row), silent=silent)])
        self._metering.returned(row.key_id, row.id)

    def _take(self, row: ResponseRow, answer: EngineAnswer) -> None:
        before = orjson.loads(row.response)
        if answer.status == 200:
            self._end(row, objects.answered(before, answer.body))
        else:
            error = answer.body.get("error") or {}
            code = "server_error" if answer.status >= 500 else "invalid_prompt"
            self._fail(row, code, str(error.get("message") or f"The request failed with status {answer.status}."))

    # --- the row

    def _fail(self, row: ResponseRow, code: str, message: str) -> None:
        self._end(row, objects.failed(orjson.loads(row.response), code, message))

    def _end(self, row: ResponseRow, response: dict[str, Any]) -> None:
        # A newer engine may report a status that rows do not have.
        known = ("completed", "incomplete", "failed", "cancelled")
        status = response["status"] if response.get("status") in known else "completed"
        self._set(row, {**response, "status": status}, status=status, request=None)

    def _set(self, row: ResponseRow, response: dict[str, Any], **changes: Any) -> None:
        text = orjson.dumps(response).decode()
        size = responses.bytes_of(row.input, text, row.request if "request" not in changes else None)
        standing = responses.standing(self._db, row.id)  # the row may have been read before its last change
        responses.update(self._db, row.id, response=text, bytes=size, **changes)
        self._stored.grew(row.key_id, size - (row.bytes if standing is None else standing[1]))
        self._stored.tell(row.id)

    def _tell_wants(self) -> None:
        flying = [model for model, _ in self._flying.values()]
        self._context.batch_engines.wants(list(dict.fromkeys([*flying, *self._waiting.values()])), ASKER)


def _tokens(row: ResponseRow) -> int:
    """The tokens of an unfinished response, estimated."""
    return responses.bytes_of(row.input, row.request) // BYTES_PER_TOKEN
