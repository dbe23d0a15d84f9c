"""Makes a POST that arrives twice create one resource.

The `openai` client retries POSTs without an Idempotency-Key but marks them in `x-stainless-retry-count` (0, 1, 2). So
an Idempotency-Key decides if there is one; otherwise a retry finds the newest resource that the same key made from the
same body within a time window, and a first attempt always makes a new one.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request

from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import BadRequest, Conflict, shown
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.objects import idempotency
from appliance.store.rows import IdempotencyRow

_BOX_ITSELF = ""  # requests over the private socket carry no key id
_MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request for a resource: caller, route, body, and whether it is marked as a retry."""

    key_id: str
    route: str
    idempotency_key: str | None
    body_sha256: str
    retry: bool

    @classmethod
    def of(cls, request: Request, caller: Principal, route: str, body: Any) -> Attempt:
        """body: JSON-serialisable stand-in for the request's body. Raises BadRequest."""
        key = request.headers.get("idempotency-key")
        if key is not None and not (key and len(key) <= _MAX_KEY_CHARACTERS and key.isprintable()):
            raise BadRequest(
                f"Invalid Idempotency-Key: {shown(key, 60)}; expected 1 to {_MAX_KEY_CHARACTERS} printable characters.",
                code="invalid_idempotency_key",
            )
        canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        count = request.headers.get("x-stainless-retry-count", "0")
        return cls(
            caller.key_id or _BOX_ITSELF,
            route,
            key,
            hashlib.sha256(canonical).hexdigest(),
            retry=count.isascii() and count.isdigit() and int(count[:9]) >= 1,
        )


def find(db: Database, attempt: Attempt, config: ControllerConfig) -> str | None:
    """Id of the resource that an earlier attempt made, or None. Raises Conflict if the idempotency key was used with
    another body."""
    if attempt.idempotency_key is not None:
        row = idempotency.by_key(db, attempt.key_id, attempt.route, attempt.idempotency_key)
        if row is None:
            return None
        if row.body_sha256 != attempt.body_sha256:
            raise Conflict(
                f"The Idempotency-Key {shown(attempt.idempotency_key, 60)} was used with another body; "
                "use a new key for a new request.",
                code="idempotency_key_reused",
            )
        return row.resource_id
    if not attempt.retry:
        return None
    since_s = time.time() - config.retry_window_s
    row = idempotency.last_by_body(db, attempt.key_id, attempt.route, attempt.body_sha256, since_s=since_s)
    return None if row is None else row.resource_id


def remember(db: Database, attempt: Attempt, resource_id: str) -> None:
    """Call in the transaction that inserts the resource; otherwise a crash between the two would duplicate it."""
    idempotency.remember(
        db,
        IdempotencyRow(
            key_id=attempt.key_id,
            route=attempt.route,
            idempotency_key=attempt.idempotency_key,
            body_sha256=attempt.body_sha256,
            resource_id=resource_id,
            created_s=time.time(),
        ),
    )
