"""The routing table that the controller sends over the bus, and the histogram buckets for times.

Four buckets per doubling give a 95th percentile to within 19 %; the controller only compares with a factor of 1.5."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from appliance.gateway.core.routes import ADMIN

OPEN = "open"
SHORTEST_S = 0.001
BUCKETS_PER_DOUBLING = 4

Limit = Annotated[int, Meta(ge=1)]


class Replica(Struct, frozen=True):
    """An engine that serves the model. socket: path of its Unix socket, or https://HOST:PORT on another machine. avoid:
    the engine does not respond, so prefer other replicas."""

    id: str
    socket: str
    version: str
    state: Literal["open", "draining"]
    avoid: bool = False


class Canary(Struct, frozen=True):
    """A version that takes a share of another model's requests. name: the canary's own row in the table. since_s: Unix
    time of the canary's start, which identifies it."""

    name: str
    share: float
    since_s: float


class StartFailure(Struct, frozen=True):
    """Why no replica of a model starts. next_try_s: Unix time of the next try. hold_before_s: requests wait for the
    next try if it is at most this many seconds away."""

    reason: str
    next_try_s: float
    hold_before_s: float


class Model(Struct, frozen=True):
    """A model's row. max_model_len: context in tokens, None if unknown. slots: concurrent sequences of one engine, None
    if unknown. host: the model whose engines serve this one, empty if it has its own. adapter: the adapter's name in
    the engine. pins: for a further name such as `m@v1`, the model `m` that the engines serve. trained_from: the base of
    a model in training. owners: owners whose keys see the model, None: all. chats: False if it is known to have no chat
    template."""

    name: str = ""
    version: str = ""
    task: Literal["generate", "embed"] = "generate"
    replicas: tuple[Replica, ...] = ()
    max_model_len: Limit | None = None
    slots: Limit | None = None
    host: str = ""
    adapter: str = ""
    pins: str = ""
    trained_from: str = ""
    canary: Canary | None = None
    trouble: StartFailure | None = None
    owners: frozenset[str] | None = None
    chats: bool = True


class Login(Struct, frozen=True):
    """A login of the page. until_s: Unix time of its end."""

    id: str
    until_s: float


class Caller(Struct, frozen=True):
    """The row of a key. owner: id shared by all keys of a person. models: models that the key may call, None: all.
    spent_until_s: Unix time at which the used-up quota renews, None while quota is left; spent_quota: that quota's
    name; quota: tokens of the key's smallest quota, None without a quota. expires_s: Unix time of the key's expiry,
    None: never; the row of an expired key has no other fields. sessions: the key's logins by the SHA-256 of their
    tokens. secret: SHA-256 of the key itself, which changes with a rotation."""

    id: str
    scopes: frozenset[str] = frozenset()
    owner: str = ""
    models: frozenset[str] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    spent_until_s: float | None = None
    spent_quota: str = ""
    quota: Limit | None = None
    expires_s: float | None = None
    sessions: dict[str, Login] = {}
    secret: str = ""

    def has_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= now_s

    def sees(self, model: Model) -> bool:
        """Whether this key sees the model; a hidden model causes the same error as a nonexistent model."""
        return model.owners is None or self.owner in model.owners or ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        """Whether the key may use a model; the right to `MODEL` includes each `MODEL@VERSION`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


NOBODY: Final = Caller("")  # the caller of a request without a key
THE_BOX: Final = Caller("", frozenset({ADMIN}), owner="box")  # the caller of the box's own request without a key


class Table(Struct, tag_field="type", tag="table"):
    """One generation of the routing table. models: rows by name. keys: rows by the key's SHA-256 in hex. degraded:
    failing parts of the box that are being retried."""

    generation: int
    models: dict[str, Model] = {}
    keys: dict[str, Caller] = {}
    degraded: list[str] = []


_TABLE: Final = msgspec.json.Decoder(Table)


def read_table(line: bytes) -> Table:
    """Parse a table. Raises msgspec.DecodeError for invalid JSON, its subclass ValidationError for another value."""
    table = _TABLE.decode(line)
    for name, model in table.models.items():
        table.models[name] = replace(model, name=name)
    for digest, key in table.keys.items():
        table.keys[digest] = replace(key, owner=key.owner or key.id, secret=digest)
    return table


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Return the bucket of a value; bucket i ends at `least * 2 ** (i / BUCKETS_PER_DOUBLING)`."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


@lru_cache(1024)
def cache_salt(owner: str, own: str = "") -> str:
    """Return the `cache_salt` of an owner's requests. own: the salt in the request, added to the owner's salt."""
    return f"{_digest(owner)}.{_digest(own)}" if own else _digest(owner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
