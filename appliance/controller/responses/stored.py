"""Stores answers of /v1/responses, and chat completions that are to be kept: received from the gateways, looked up by
id, deleted when they expire.

A gateway sends the copy after the client has its answer, so a fast client may ask for a response that has not arrived:
a request for an unknown id waits for it briefly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import orjson

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import ApiError, BadRequest, NotFound, shown
from appliance.controller.responses.completions import completion_row
from appliance.controller.responses.items import Item, items_of, turn_items
from appliance.store.objects import responses
from appliance.store.objects.responses import COMPLETION
from appliance.store.records import keys
from appliance.store.rows import AnswerKind, ResponseRow, ResponseStatus

log = logging.getLogger("appliance.controller")

DAY_S = 86400.0
ARRIVES_WITHIN_S = 1.0
MAX_TURNS = 2000
CONVERSATION_BYTES = 64 << 20
_TOUCH_EVERY_S = 3600.0
_COMPLETION_ID_CHARS = 128
_STATUSES = frozenset(get_args(ResponseStatus))


class StoredResponses:
    """Responses and chat completions of all owners. `viewer`: the calling owner, who sees only its own; None: an admin
    or the box."""

    def __init__(self, context: ControllerContext):
        self._db, self._config, self._quotas = context.db, context.config, context.quotas
        self._asked: dict[str, list[asyncio.Future[None]]] = {}

    # --- in

    async def take(self, copies: list[Any]) -> int:
        """Store copies from a gateway: each {"key", "previous", "input", "response"}; of a chat completion `input` is
        what it was asked with, an object. Returns how many were new. Copies of a person who has left are not stored: a
        gateway keeps them while the controller is away, and they would bring back a person who was forgotten."""
        if not self._config.responses_kept_days:
            return 0
        if self._quotas.disk.room_bytes() <= 0:
            log.error("%d answered responses are not stored: the disk is short of space", len(copies))
            return 0
        new = await asyncio.to_thread(self._add, copies)
        for row in new:
            self.tell(row.id)
        return len(new)

    def _add(self, copies: list[Any]) -> list[ResponseRow]:
        """The new ones. Runs on a thread; one transaction each, for a copy may have megabytes."""
        named = {copy["key"] for copy in copies if isinstance(copy, dict) and isinstance(copy.get("key"), str)}
        owners = {key_id: keys.owner_of(self._db, key_id) for key_id in named}
        new = list[ResponseRow]()
        for row in _rows(copies, owners):
            with self._db.transaction():
                if not keys.owner_has_left(self._db, row.key_id) and responses.insert(self._db, row):
                    new.append(row)
        self.make_room(new)
        return new

    def make_room(self, new: list[ResponseRow]) -> None:
        """Touch what these new rows continue, then delete the least recently used beyond the limits. On a thread."""
        for row in new:
            if row.previous_id is not None:
                times = {"now_s": row.used_s, "older_than_s": row.used_s - _TOUCH_EVERY_S}
                responses.touch(self._db, row.previous_id, row.owner, max_turns=MAX_TURNS, **times)
        for key_id in {row.key_id for row in new}:
            bounds, owner = self._quotas.bounds(key_id), keys.owner_of(self._db, key_id)
            responses.shrink_owner(self._db, owner, number=bounds.responses, size=bounds.responses_bytes)
        if responses.totals(self._db)[1] > self._config.responses_bytes:
            # To below the limit, or the next response would have to make room again.
            deleted = responses.shrink(self._db, int(self._config.responses_bytes * 0.95))
            log.info("responses_bytes is reached: deleted the %d least recently used", deleted)

    # --- out

    async def find(self, response_id: str, viewer: str | None, kind: AnswerKind = "response") -> ResponseRow:
        """Raises NotFound, equally late for other owners' responses: the timing must not reveal that one exists."""
        row = await self._arrived(response_id, viewer, kind)
        if row is None:
            raise _not_found(response_id, kind)
        return row

    def turns(self, response_id: str, viewer: str | None) -> Iterator[ResponseRow]:
        """The stored turns of the conversation up to this response, oldest first: within a reading. Raises BadRequest
        if it has too many."""
        ids = responses.chain_ids(self._db, response_id, viewer, max_turns=MAX_TURNS)
        if len(ids) >= MAX_TURNS:
            raise _too_long(response_id)
        for turn in ids:
            if (found := responses.find(self._db, turn)) is not None:  # else it was deleted in the meantime
                yield found

    async def before(self, previous_id: str, viewer: str | None) -> list[str]:
        """The ids, oldest first, that a new response with this previous id continues from. Raises BadRequest."""
        try:
            last = await self.find(previous_id, viewer)
        except NotFound as error:
            raise previous_not_found(previous_id) from error
        ids = await asyncio.to_thread(self._leading_to, last.id, viewer)
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

    def items(self, ids: list[str]) -> list[Item]:
        """What a later response continues from, of all these responses. On a thread: it may be megabytes. Raises
        BadRequest, also when the total exceeds what one request may hold."""
        found, size = list[Item](), 0
        for response_id in ids:
            if (row := responses.find(self._db, response_id)) is None:
                raise previous_not_found(response_id)  # deleted in the meantime
            turn = turn_items(row)
            size += len(orjson.dumps(turn))
            if size > self._config.json_body_bytes:
                raise _too_long(ids[-1], self._config.json_body_bytes)
            found += turn
        return found

    def describe(self, completion_id: str, metadata: dict[str, str] | None) -> None:
        """Raises NotFound as `delete` does."""
        if not responses.set_metadata(self._db, completion_id, metadata):
            raise _not_found(completion_id, COMPLETION)

    def delete(self, response_id: str, kind: AnswerKind = "response") -> None:
        """Raises NotFound: it was found on a thread and may have been deleted since."""
        if not responses.delete(self._db, response_id):
            raise _not_found(response_id, kind)
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

    def keep_house(self, now_s: float) -> None:
        """On a thread."""
        for key_id in responses.keys_without_owners(self._db):
            responses.delete_of_key(self._db, key_id)
        responses.delete_unused(self._db, now_s - self._config.responses_kept_days * DAY_S)
        self.make_room([])

    async def _arrived(self, response_id: str, viewer: str | None, kind: AnswerKind) -> ResponseRow | None:
        row = await self._visible(response_id, viewer, kind)
        if row is not None or not _is_an_engines(response_id, kind):
            return row
        # It may have come while the thread looked.
        arrived = responses.exists(self._db, response_id, viewer) or await self.news(response_id, ARRIVES_WITHIN_S)
        return await self._visible(response_id, viewer, kind) if arrived else None

    async def _visible(self, response_id: str, viewer: str | None, kind: AnswerKind) -> ResponseRow | None:
        row = await asyncio.to_thread(responses.find, self._db, response_id)
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
