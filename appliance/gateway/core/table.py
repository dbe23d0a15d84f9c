"""The routing table, as the controller sends it over the bus; and the buckets in which the gateway counts times.

A bucket is a quarter of a power of two wide, so that a 95th percentile is known to 19 %: the bounds that the controller
compares with are far wider (1.5 x)."""

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
    """socket: path of its Unix socket, or https://HOST:PORT on another machine. avoid: its engine gives no sign of
    life, so that others are preferred."""

    id: str
    socket: str
    version: str
    state: Literal["open", "draining"]
    avoid: bool = False


class Canary(Struct, frozen=True):
    """Another version that takes a share of a model's requests. name: its own row. since_s: Unix time of its start,
    which identifies this canary."""

    name: str
    share: float
    since_s: float


class StartFailure(Struct, frozen=True):
    """Why no replica of a model starts. next_try_s: Unix time. hold_before_s: requests wait for the next try if it is
    at most this far away."""

    reason: str
    next_try_s: float
    hold_before_s: float


class Model(Struct, frozen=True):
    """max_model_len: context of its engines in tokens; slots: sequences that one of them computes at once; None where
    unknown. host: the model whose engines serve it, empty where they are its own. adapter: the name by which they know
    an adapter; pins: the model that they serve under this further name, such as `m@v1` of `m`. trained_from: the base
    of a model in training. owners: of keys for which it exists, None: for all. chats: False for one that is known to
    have no chat template."""

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
    """The row of a key. owner: all keys of a person have the same. models: the only ones it may call, None for all.
    spent_until_s: Unix time at which its used-up quota renews, None while quota is left; spent_quota: the name of that
    quota; quota: tokens of the smaller of its quotas, None without one. expires_s: Unix time from which the key is
    refused, None for no end; the row of a key that has ended has nothing else. sessions: its logins by the SHA-256 of
    their tokens. secret: SHA-256 of its key, a new one after a rotation."""

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
        """Whether the model exists for this key; if not, the answer is the same as for a nonexistent model."""
        return model.owners is None or self.owner in model.owners or ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        """A key that may use a model may use its versions by their names, `MODEL@VERSION`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


NOBODY: Final = Caller("")  # of a request without a key
THE_BOX: Final = Caller("", frozenset({ADMIN}), owner="box")  # of requests of the box itself that are for no key


class Table(Struct, tag_field="type", tag="table"):
    """One generation of the routing table. models: by name; keys: by the SHA-256 of the key, in hex; degraded: parts of
    the box that fail and are tried again."""

    generation: int
    models: dict[str, Model] = {}
    keys: dict[str, Caller] = {}
    degraded: list[str] = []


_TABLE: Final = msgspec.json.Decoder(Table)


def read_table(line: bytes) -> Table:
    """Raises msgspec.DecodeError: not JSON; `ValidationError`, a kind of it: not a table."""
    table = _TABLE.decode(line)
    for name, model in table.models.items():
        table.models[name] = replace(model, name=name)
    for digest, key in table.keys.items():
        table.keys[digest] = replace(key, owner=key.owner or key.id, secret=digest)
    return table


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Bucket i ends at least * 2 ** (i / BUCKETS_PER_DOUBLING)."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


@lru_cache(1024)
def cache_salt(owner: str, own: str = "") -> str:
    """The `cache_salt` of an owner's requests. own: the request's own salt, which separates it further."""
    return f"{_digest(owner)}.{_digest(own)}" if own else _digest(owner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
