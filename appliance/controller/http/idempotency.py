"""Makes a POST that arrives twice create one resource.

The `openai` client retries POSTs without an Idempotency-Key but marks them in `x-stainless-retry-count` (0, 1, 2). So
an Idempotency-Key decides if there is one; otherwise a retry finds the newest resource that the same key made from the
same body within a time window, and a first attempt always makes a new one.

Every POST that makes something goes through `once`, and so does every POST that would change something a second time
(a model goes back one version): what the latter makes is a Deed. A test lists the POSTs that need neither, with the
reason; a route that nobody has judged fails it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request

from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import BadRequest, Conflict, KeyRevoked, shown
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.ids import new_id
from appliance.store.objects import idempotency
from appliance.store.records import keys
from appliance.store.rows import IdempotencyRow


class Kept(Protocol):
    @property
    def id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Deed:
    """A change that leaves nothing of its own in the store, kept by what was answered of it. id: that, as JSON."""

    id: str

    @classmethod
    def of(cls, **told: Any) -> Deed:
        return cls(orjson.dumps({"deed": new_id("deed_"), "told": told}).decode())

    @property
    def told(self) -> dict[str, Any]:
        return dict(orjson.loads(self.id)["told"])


Row = TypeVar("Row", bound=Kept)
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
    secret: str | None

    @classmethod
    def of(cls, request: Request, caller: Principal, route: str, body: Any) -> Attempt:
        """body: JSON-serialisable stand-in for the request's body, or its bytes where they are too many to be written
        again. Raises BadRequest."""
        key = request.headers.get("idempotency-key")
        if key is not None and not (key and len(key) <= _MAX_KEY_CHARACTERS and key.isprintable()):
            raise BadRequest(
                f"Invalid Idempotency-Key: {shown(key, 60)}; expected 1 to {_MAX_KEY_CHARACTERS} printable characters.",
                code="invalid_idempotency_key",
            )
        canonical = body if isinstance(body, bytes) else orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        count = request.headers.get("x-stainless-retry-count", "0")
        return cls(
            caller.key_id or _BOX_ITSELF,
            route,
            key,
            hashlib.sha256(canonical).hexdigest(),
            retry=count.isascii() and count.isdigit() and int(count[:9]) >= 1,
            secret=caller.secret,
        )


def find(db: Database, config: ControllerConfig, attempt: Attempt) -> str | None:
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


def earlier(db: Database, config: ControllerConfig, attempt: Attempt, known: Callable[[str], Row | None]) -> Row | None:
    """What an earlier attempt made, as `once` says. Ask before what the request names is looked at: a retry was refused
    because a file that its first attempt had named was gone by then. Raises Conflict."""
    found = find(db, config, attempt)
    return None if found is None else known(found)


def may_come_again(request: Request, caller: Principal, route: str, db: Database, config: ControllerConfig) -> bool:
    """Whether an earlier request may have made what this one asks for, told before its body is read: a bound that the
    first of them has reached is no reason to refuse the second. `once` says whether it did. Raises BadRequest."""
    attempt = Attempt.of(request, caller, route, b"")
    if attempt.idempotency_key is not None:
        return idempotency.by_key(db, attempt.key_id, route, attempt.idempotency_key) is not None
    return attempt.retry and idempotency.any_since(db, attempt.key_id, route, time.time() - config.retry_window_s)


def once(
    db: Database,
    config: ControllerConfig,
    attempt: Attempt,
    known: Callable[[str], Row | None],
    make: Callable[[], Row],
) -> tuple[Row, bool]:
    """What the request makes, and whether it was made now. known: the row of an id, None if it has gone. make: checks
    bounds and inserts the row.

    One transaction without an await: of two copies of a request one makes it and the other finds it. Raises
    Conflict for a key that was used with another body, and KeyRevoked for an API key that has ended since: what was
    looked through for minutes would be there again of a person who was forgotten meanwhile, by name.
    """
    with db.transaction():
        if (row := earlier(db, config, attempt, known)) is not None:
            return row, False
        if how := keys.how_ended(db, attempt.key_id, attempt.secret):
            raise KeyRevoked(how)
        row = make()
        _remember(db, attempt, row.id)
    return row, True


class Carried:
    """Carries one request out that changes something, unless an earlier attempt of it has."""

    def __init__(self, db: Database, config: ControllerConfig, attempt: Attempt):
        self._db, self._config, self._attempt = db, config, attempt
        self._deed: Deed | None = None

    def done(self) -> dict[str, Any] | None:
        """What an earlier attempt has changed, as `earlier` says."""
        deed = earlier(self._db, self._config, self._attempt, Deed)
        return None if deed is None else deed.told

    def before(self, make: Callable[[], Deed]) -> dict[str, Any] | None:
        """What an earlier attempt has changed. None: there was none, and this one is to do what `make` says. Ask while
        nothing else can change the same."""
        deed, new = once(self._db, self._config, self._attempt, Deed, make)
        self._deed = deed if new else None
        return None if new else deed.told

    def came_to_nothing(self) -> None:
        """The next request like it is carried out."""
        if self._deed is not None:
            idempotency.forget(self._db, self._attempt.key_id, self._attempt.route, self._deed.id)


def _remember(db: Database, attempt: Attempt, resource_id: str) -> None:
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
