"""Stores answers of /v1/responses, and chat completions that are to be kept: received from the gateways, looked up by
id, deleted when they expire.

A gateway sends the copy after the client has its answer, so a fast client may ask for a response that has not arrived:
a request for an unknown id waits for it briefly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

import orjson

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import ApiError, BadRequest, NotFound, shown
from appliance.controller.responses.completions import completion_row
from appliance.controller.responses.items import Item, items_of, turn_items
from appliance.store.chunks import little_by_little
from appliance.store.database import BOX
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION
from appliance.store.records import keys
from appliance.store.rows import AnswerKind, ResponseRow, ResponseStatus
from appliance.store.upkeep import holdings
from runtime.background_tasks import RunningTasks

log = logging.getLogger("appliance.controller")

DAY_S = 86400.0
ARRIVES_WITHIN_S = 1.0
MAX_TURNS = 2000
CONVERSATION_BYTES = 64 << 20
# After this many bytes of a key (each row counts at least _ROW_BYTES) its owner's limits are checked.
_LOOK_AFTER_BYTES, _ROW_BYTES = 4 << 20, 16 << 10
# More than are added before the next look; freeing 1 MiB takes SQLite some 20 ms.
_AT_ONCE_BYTES = 2 * _LOOK_AFTER_BYTES
_STORED_AT_ONCE_BYTES = 1 << 20  # which takes SQLite some 10 ms
_TOUCH_EVERY_S = 3600.0
_COMPLETION_ID_CHARS = 128
_STATUSES = frozenset(get_args(ResponseStatus))
# Per owner: this many callers may wait for an answer that has not arrived; further ones get NotFound at once.
_MOST_EXPECTED = 100


class Turn(NamedTuple):
    """items: of one response. text: the same, a JSON array."""

    items: list[Item]
    text: bytes


class StoredResponses:
    """Responses and chat completions of all owners. `viewer`: the calling owner, who sees only its own; None: an admin
    or the box. tasks: what goes on behind an answer."""

    def __init__(self, context: ControllerContext):
        self._db, self._config, self._quotas = context.db, context.config, context.quotas
        self._unchecked: Counter[str] = Counter()  # by key: bytes since its owner's limits were last checked
        self._bytes = responses.totals(context.db)[1]
        self._asked: dict[str, list[asyncio.Future[None]]] = {}
        self._expected: Counter[str | None] = Counter()  # by viewer
        self._continued: dict[str, tuple[str, float]] = {}  # id -> owner, when: earlier turns are still to be touched
        self._background, self.tasks = context.background, RunningTasks()
        self._touching: asyncio.Task[None] | None = None

    # --- in

    async def take(self, copies: list[Any]) -> int:
        """Store copies from a gateway: each {"key", "previous", "input", "response"}; of a chat completion `input` is
        what it was asked with, an object. Returns how many were new. They are written on a thread, and stored so many
        bytes at a time: 64 MiB come at once. Copies of a person who has left are not stored: a gateway keeps them while
        the controller is away, and they would bring back a person who was forgotten."""
        if not self._config.responses_kept_days:
            return 0
        if self._quotas.disk.room_bytes() <= 0:
            log.error("%d answered responses are not stored: the disk is short of space", len(copies))
            return 0
        named = {copy["key"] for copy in copies if isinstance(copy, dict) and isinstance(copy.get("key"), str)}
        owners = {key_id: keys.owner_of(self._db, key_id) for key_id in named}
        left, new = deque(await asyncio.to_thread(_rows, copies, owners)), 0
        while left:
            rows, size = list[ResponseRow](), 0
            while left and size < _STORED_AT_ONCE_BYTES:
                rows.append(left.popleft())
                size += rows[-1].bytes + _ROW_BYTES
            gone = {key_id for key_id in {row.key_id for row in rows} if keys.owner_has_left(self._db, key_id)}
            rows = [row for row in rows if row.key_id not in gone]
            if size < _STORED_AT_ONCE_BYTES:
                new += self.add(rows)
                await asyncio.sleep(0)
            else:
                with self._db.log_is_left():
                    new += self.add(rows)
                await self._db.carry_over()
        return new

    def add(self, rows: list[ResponseRow]) -> int:
        new = 0
        with self._db.transaction():
            for row in rows:
                if not responses.insert(self._db, row):
                    continue
                new += 1
                self._bytes += row.bytes
                self._unchecked[row.key_id] += row.bytes + _ROW_BYTES
                if row.previous_id is not None and self._touched_some(row.previous_id, row.owner, row.used_s):
                    self._continued[row.previous_id] = row.owner, row.used_s
        if not self._continued:
            for key_id in {row.key_id for row in rows if self._unchecked[row.key_id] > _LOOK_AFTER_BYTES}:
                self._keep_bounds(key_id)
            self._shrink()
        elif self._touching is None or self._touching.done():
            # Do this first, or making room would delete turns that a later response continues from; the next response
            # makes room.
            touch = self._background.keep("conversations that go on", self._touch_continued)
            self._touching = self.tasks.add(touch)
        for row in rows:
            self.tell(row.id)
        return new

    async def _touch_continued(self) -> None:
        """Turns are kept as long as a response that continues from them: touched a few at a time in a long
        conversation."""
        while self._continued:
            response_id, (owner, at_s) = next(iter(self._continued.items()))
            await little_by_little(partial(self._touched_some, response_id, owner, at_s))
            self._continued.pop(response_id, None)

    def _touched_some(self, response_id: str, owner: str, at_s: float) -> bool:
        older_than_s = at_s - _TOUCH_EVERY_S
        return responses.touch_some(
            self._db, response_id, owner, max_turns=MAX_TURNS, now_s=at_s, older_than_s=older_than_s
        )

    def grew(self, key_id: str, more: int) -> None:
        """A background response was answered: it has this many more bytes. The next response, or housekeeping, checks
        its owner's bounds, because this call may be within the transaction that revokes a key."""
        self._bytes += more
        self._unchecked[key_id] += max(0, more)

    # --- out

    async def find(self, response_id: str, viewer: str | None, kind: AnswerKind = "response") -> ResponseRow:
        """Raises NotFound, equally late for other owners' responses: the timing must not reveal that one exists."""
        row = await self._arrived(response_id, viewer, kind)
        if row is None:
            raise _not_found(response_id, kind)
        return row

    def turns(self, response_id: str, viewer: str | None, *, newest_first: bool) -> Iterator[ResponseRow]:
        """The stored turns of the conversation up to this response, one by one, for it may be 64 MiB: within a reading.
        Raises BadRequest if it has too many turns."""
        ids = responses.chain_ids(self._db, response_id, viewer, max_turns=MAX_TURNS)
        if len(ids) >= MAX_TURNS:
            raise _too_long(response_id)
        for turn in reversed(ids) if newest_first else ids:
            found = responses.find(self._db, turn)
            if found is not None:  # else it was deleted in the meantime
                yield found

    async def before(self, previous_id: str, viewer: str | None) -> list[str]:
        """The ids, oldest first, that a new response with this previous id continues from. Raises BadRequest."""
        try:
            last = await self.find(previous_id, viewer)
        except NotFound as error:
            raise previous_not_found(previous_id) from error
        ids = await self._db.read(viewer, self._leading_to, last.id, viewer)
        if not last.finished:
            raise BadRequest(
                f"Previous response with id {shown(previous_id)} is {last.status}: wait for its end.",
                param="previous_response_id",
                code="previous_response_not_ready",
            )
        return ids

    def _leading_to(self, response_id: str, viewer: str | None) -> list[str]:
        """Within a reading. Raises BadRequest."""
        size = responses.chain_bytes(self._db, response_id, viewer, max_turns=MAX_TURNS)
        ids = responses.chain_ids(self._db, response_id, viewer, max_turns=MAX_TURNS)
        if not ids:
            raise previous_not_found(response_id)  # deleted in the meantime
        if size > CONVERSATION_BYTES or len(ids) >= MAX_TURNS:
            raise _too_long(response_id)
        first = responses.find(self._db, ids[0])
        if first is not None and first.previous_id is not None:
            raise previous_not_found(first.previous_id)
        return ids

    async def items(self, ids: list[str], viewer: str | None) -> AsyncIterator[Turn]:
        """What a later response continues from, for each of these responses. One at a time, so that other readings come
        in between: a request of a hundred bytes can name a conversation of 64 MiB. Raises BadRequest, also when the
        total exceeds what one request may hold: continuing must not allow more than a single request."""
        left = self._config.json_body_bytes
        for response_id in ids:
            turn = await self._db.read(viewer, self._turn, response_id)
            left -= len(turn.text)
            if left < 0:
                raise _too_long(ids[-1], self._config.json_body_bytes)
            yield turn

    def _turn(self, response_id: str) -> Turn:
        """Within a reading. Raises BadRequest."""
        row = responses.find(self._db, response_id)
        if row is None:
            raise previous_not_found(response_id)  # deleted in the meantime
        items = turn_items(row)
        return Turn(items, orjson.dumps(items))

    def describe(self, completion_id: str, metadata: dict[str, str] | None) -> None:
        """Raises NotFound as `delete` does."""
        if not responses.set_metadata(self._db, completion_id, metadata):
            raise _not_found(completion_id, COMPLETION)

    def delete(self, response_id: str, kind: AnswerKind = "response") -> None:
        """Raises NotFound: it was found on a thread and may have been deleted since."""
        size = responses.delete(self._db, response_id)
        if size is None:
            raise _not_found(response_id, kind)
        self._bytes -= size
        self.tell(response_id)

    # --- news

    async def news(self, response_id: str, timeout_s: float) -> bool:
        """True as soon as the response is stored or changed, False if neither happens within this time."""
        asking = asyncio.get_running_loop().create_future()
        self._asked.setdefault(response_id, []).append(asking)
        try:
            async with asyncio.timeout(timeout_s):
                await asking
        except TimeoutError:
            return False
        finally:
            others = [other for other in self._asked.pop(response_id, ()) if other is not asking]
            if others:
                self._asked[response_id] = others
        return True

    def tell(self, response_id: str) -> None:
        for asking in self._asked.pop(response_id, ()):
            if not asking.done():
                asking.set_result(None)

    # --- time

    async def keep_house(self, now_s: float) -> None:
        for key_id in await self._db.read(BOX, responses.keys_without_owners, self._db):
            await little_by_little(partial(responses.delete_of_key, self._db, key_id))
        before_s = now_s - self._config.responses_kept_days * DAY_S
        await little_by_little(partial(responses.delete_unused, self._db, before_s))
        for key_id in list(self._unchecked):
            await little_by_little(partial(self._keep_bounds, key_id))
        self._bytes = responses.totals(self._db)[1]
        await little_by_little(self._shrink)

    def _keep_bounds(self, key_id: str) -> bool:
        """Delete the least recently used responses of this key's owner beyond the limits, as many as may go at once.
        False: none is beyond them."""
        self._unchecked.pop(key_id, None)
        bounds = self._quotas.bounds(key_id)
        gone = holdings.shrink_responses(self._db, key_id, bounds.responses, bounds.responses_bytes, _AT_ONCE_BYTES)
        if gone:
            self._bytes = responses.totals(self._db)[1]
        return gone > 0

    def _shrink(self) -> bool:
        """Free as much as may be freed at once; False: there is enough room, or the rest is still being answered."""
        if self._bytes <= self._config.responses_bytes:
            return False
        # Delete to below the limit, or the next response would have to make room again.
        with self._db.transaction():
            deleted = responses.shrink(self._db, int(self._config.responses_bytes * 0.95), _AT_ONCE_BYTES)
        self._bytes = responses.totals(self._db)[1]
        log.info("responses_bytes is reached: deleted the %d least recently used", deleted)
        return deleted > 0

    async def _arrived(self, response_id: str, viewer: str | None, kind: AnswerKind) -> ResponseRow | None:
        row = await self._visible(response_id, viewer, kind)
        if row is not None or not _is_an_engines(response_id, kind) or self._expected[viewer] >= _MOST_EXPECTED:
            return row
        self._expected[viewer] += 1
        try:
            # It may have come while the thread looked.
            arrived = responses.exists(self._db, response_id, viewer) or await self.news(response_id, ARRIVES_WITHIN_S)
        finally:
            self._expected[viewer] -= 1
            if not self._expected[viewer]:
                del self._expected[viewer]
        return await self._visible(response_id, viewer, kind) if arrived else None

    async def _visible(self, response_id: str, viewer: str | None, kind: AnswerKind) -> ResponseRow | None:
        row = await self._db.read(viewer, responses.find, self._db, response_id)
        return row if row is not None and row.kind == kind and viewer in (None, row.owner) else None


def _not_found(response_id: str, kind: AnswerKind) -> ApiError:
    if kind == COMPLETION:
        text = f"Chat completion with id {shown(response_id)} not found."
        return NotFound(text, param="completion_id", code="chat_completion_not_found")
    return NotFound(f"Response with id {shown(response_id)} not found.", param="response_id", code="response_not_found")


def _too_long(response_id: str, most_bytes: int = CONVERSATION_BYTES) -> ApiError:
    return BadRequest(
        f"The conversation up to {shown(response_id)} has more than {MAX_TURNS} turns or "
        f"{most_bytes} bytes: begin a new one.",
        param="previous_response_id",
        code="context_length_exceeded",
    )


def previous_not_found(response_id: str) -> ApiError:
    return BadRequest(
        f"Previous response with id {shown(response_id)} not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _is_an_engines(response_id: str, kind: AnswerKind) -> bool:
    """Whether it is an id of vLLM's, the only ones that can be on their way."""
    if kind == COMPLETION:
        return response_id.startswith("chatcmpl-") and len(response_id) <= _COMPLETION_ID_CHARS
    digits = response_id.removeprefix("resp_")
    return len(digits) < len(response_id) and 8 <= len(digits) <= 64 and set(digits) <= set("0123456789abcdef")


def _rows(copies: list[Any], owners: Mapping[str, str]) -> list[ResponseRow]:
    """owners: by key. What is no copy is left out."""
    rows, refused = list[ResponseRow](), list[Exception]()
    for copy in copies:
        try:
            rows.append(_row(copy, owners[copy["key"]]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            refused.append(error)
    if refused:
        told = f"{type(refused[0]).__name__}: {refused[0]}"
        first = told[:200]  # some errors have the whole of what they could not read
        log.error("a gateway sent %d responses that cannot be stored, the first: %s", len(refused), first)
    return rows


def _row(copy: dict[str, Any], owner: str) -> ResponseRow:
    response, previous = copy["response"], copy["previous"]
    if response.get("object") == COMPLETION:
        return completion_row(str(copy["key"]), owner, copy["input"], response)
    if not isinstance(previous, str | None):
        raise TypeError(f"its previous response is a {type(previous).__name__}")
    if not isinstance(response["status"], str) or response["status"] not in _STATUSES:
        raise ValueError(f"its status is {shown(response['status'])}")
    given, answered = orjson.dumps(items_of(copy["input"])).decode(), orjson.dumps(response).decode()
    return ResponseRow(
        id=str(response["id"]),
        key_id=str(copy["key"]),
        status=response["status"],
        used_s=time.time(),
        created_s=float(response["created_at"]),
        bytes=responses.bytes_of(given, answered),
        input=given,
        response=answered,
        previous_id=previous,
        owner=owner,
    )
