"""Makes a POST that arrives twice create one resource.

The `openai` client retries POSTs without an Idempotency-Key but marks them in `x-stainless-retry-count` (0, 1, 2). So
an Idempotency-Key decides if there is one; otherwise a retry finds the newest resource that the same key made from the
same body within a time window, and a first attempt always makes a new one.

Every POST of /v1 that makes something goes through `once`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import orjson
from fastapi import Request

from appliance.controller.interfaces.errors import BadRequest, Conflict, KeyRevoked, shown
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import IDEMPOTENCY, IdempotencyRow


class Kept(Protocol):
    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=Kept)
_BOX_ITSELF = ""  # requests over the private socket carry no key id
_MAX_KEY_CHARACTERS = 255


class Attempt(Generic[Row]):
    """One request that makes something, which may have come before."""

    def __init__(
        self, request: Request, caller: Principal, route: str, body: Any, known: Callable[[str], Row | None]
    ) -> None:
        """body: JSON-serialisable stand-in for the request's body, or its bytes where they are too many to be written
        again. known: the row of an id, None if it has gone. Raises BadRequest."""
        context = request.app.state.context
        self._db: Database = context.db
        self._since_s = time.time() - context.config.retry_window_s
        self._known, self._route = known, route
        self._key = request.headers.get("idempotency-key")
        if self._key is not None and not (self._key.isprintable() and 0 < len(self._key) <= _MAX_KEY_CHARACTERS):
            raise BadRequest(
                f"Invalid Idempotency-Key: {shown(self._key, 60)}; expected 1 to {_MAX_KEY_CHARACTERS} printable "
                "characters.",
                code="invalid_idempotency_key",
            )
        canonical = body if isinstance(body, bytes) else orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        self._body_sha256 = hashlib.sha256(canonical).hexdigest()
        self._is_retry = is_retry(request)
        self._key_id = caller.key_id or _BOX_ITSELF

    def earlier(self) -> Row | None:
        """The row that an earlier attempt made. Call it before the objects that the request names are looked up: they
        may be gone by now. Raises Conflict if the idempotency key was used with another body."""
        select, parameters = "SELECT * FROM idempotency WHERE key_id = ? AND route = ?", [self._key_id, self._route]
        row: IdempotencyRow | None = None
        if self._key is not None:
            row = self._db.one(IdempotencyRow, f"{select} AND idempotency_key = ?", [*parameters, self._key])
            if row is not None and row.body_sha256 != self._body_sha256:
                raise Conflict(
                    f"The Idempotency-Key {shown(self._key, 60)} was used with another body; use a new key for a new "
                    "request.",
                    code="idempotency_key_reused",
                )
        elif self._is_retry:
            newest = f"{select} AND body_sha256 = ? AND created_s >= ? ORDER BY seq DESC LIMIT 1"
            row = self._db.one(IdempotencyRow, newest, [*parameters, self._body_sha256, self._since_s])
        return None if row is None else self._known(row.resource_id)

    def once(self, make: Callable[[], Row]) -> Row:
        """The row that the request makes, or that an earlier attempt made. make: checks bounds and inserts the row.

        One transaction without an await: of two copies of a request one makes it and the other finds it. Raises
        Conflict for a key that was used with another body, and KeyRevoked for an API key that has ended since.
        """
        with self._db.transaction():
            if (row := self.earlier()) is not None:
                return row
            if how := keys.how_ended(self._db, self._key_id):
                raise KeyRevoked(how)
            row = make()
            # In the same transaction: a crash between the two would duplicate the resource. A second use of an
            # idempotency key replaces the first, whose resource is gone by then.
            same = "key_id = ? AND route = ? AND idempotency_key = ?"
            self._db.execute(f"DELETE FROM idempotency WHERE {same}", [self._key_id, self._route, self._key])
            now_s = time.time()
            IDEMPOTENCY.insert(
                self._db, IdempotencyRow(self._key_id, self._route, self._key, self._body_sha256, row.id, now_s)
            )
        return row


def is_retry(request: Request) -> bool:
    """Whether the SDK marks it as one."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdigit() and int(count[:9]) >= 1


def may_have_come(request: Request) -> bool:
    return is_retry(request) or "idempotency-key" in request.headers
