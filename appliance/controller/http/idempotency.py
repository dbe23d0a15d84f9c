"""Makes a POST that arrives twice create one resource.

The `openai` client retries POSTs without an Idempotency-Key but marks them in `x-stainless-retry-count` (0, 1, 2). So
an Idempotency-Key decides if there is one; otherwise a retry finds the newest resource that the same key made from the
same body within a time window, and a first attempt always makes a new one.

Every POST that makes something goes through `once`, and so does every POST that would change something a second time
(a model goes back one version): what the latter makes is a Deed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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


class Attempt(Generic[Row]):
    """One request that makes something, which may have come before."""

    def __init__(
        self, request: Request, caller: Principal, route: str, body: Any, known: Callable[[str], Row | None]
    ) -> None:
        """body: JSON-serialisable stand-in for the request's body, or its bytes where they are too many to be written
        again. known: the row of an id, None if it has gone. Raises BadRequest."""
        context = request.app.state.context
        self._db: Database = context.db
        self._config: ControllerConfig = context.config
        self._known, self._caller, self._route = known, caller, route
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
        """What an earlier attempt made. Ask before what the request names is looked at: it may be gone by now. Raises
        Conflict if the idempotency key was used with another body."""
        row = self._found()
        return None if row is None else self._known(row.resource_id)

    def _found(self) -> IdempotencyRow | None:
        if self._key is not None:
            row = idempotency.by_key(self._db, self._key_id, self._route, self._key)
            if row is not None and row.body_sha256 != self._body_sha256:
                raise Conflict(
                    f"The Idempotency-Key {shown(self._key, 60)} was used with another body; use a new key for a new "
                    "request.",
                    code="idempotency_key_reused",
                )
            return row
        if not self._is_retry:
            return None
        since_s = time.time() - self._config.retry_window_s
        return idempotency.last_by_body(self._db, self._key_id, self._route, self._body_sha256, since_s=since_s)

    def once(self, make: Callable[[], Row]) -> tuple[Row, bool]:
        """What the request makes, and whether it was made now. make: checks bounds and inserts the row.

        One transaction without an await: of two copies of a request one makes it and the other finds it. Raises
        Conflict for a key that was used with another body, and KeyRevoked for an API key that has ended since.
        """
        with self._db.transaction():
            if (row := self.earlier()) is not None:
                return row, False
            if how := keys.how_ended(self._db, self._key_id, self._caller.secret):
                raise KeyRevoked(how)
            row = make()
            # In the same transaction: a crash between the two would duplicate the resource.
            idempotency.remember(
                self._db,
                IdempotencyRow(
                    key_id=self._key_id,
                    route=self._route,
                    idempotency_key=self._key,
                    body_sha256=self._body_sha256,
                    resource_id=row.id,
                    created_s=time.time(),
                ),
            )
        return row, True

    def forget(self, resource_id: str) -> None:
        idempotency.forget(self._db, self._key_id, self._route, resource_id)


def is_retry(request: Request) -> bool:
    """Whether the SDK marks it as one."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdigit() and int(count[:9]) >= 1


def may_have_come(request: Request) -> bool:
    return is_retry(request) or "idempotency-key" in request.headers


class Carried(Attempt[Deed]):
    """Carries one request out that changes something, unless an earlier attempt of it has."""

    def __init__(self, request: Request, caller: Principal, route: str, body: Any) -> None:
        super().__init__(request, caller, route, body, Deed)
        self._deed: Deed | None = None

    def before(self, make: Callable[[], Deed]) -> dict[str, Any] | None:
        """What an earlier attempt has changed. None: there was none, and this one is to do what `make` says. Ask while
        nothing else can change the same."""
        deed, new = self.once(make)
        self._deed = deed if new else None
        return None if new else deed.told

    def came_to_nothing(self) -> None:
        """The next request like it is carried out."""
        if self._deed is not None:
            self.forget(self._deed.id)
