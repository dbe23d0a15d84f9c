"""The messages that the controller sends over the bus, as types: the routing table and the box's troubles.

What becomes part of a header line is printable ASCII: a control character there would be a header injection.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from appliance.gateway.core.routes import ADMIN

OPEN = "open"

Text = Annotated[str, Meta(pattern=r"\A[ -~]*\Z")]
Address = Annotated[str, Meta(pattern=r"\A(/|https://)[ -~]*\Z")]
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.:-]{1,128}\Z")]
# A comma would split it in the header, and gateways use the name `gateway` for themselves.
Scope = Annotated[str, Meta(pattern=r"\A(?!gateway\Z)[a-z_]{1,32}\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Limit = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Replica(Struct, frozen=True):
    """socket: path of its Unix socket, or https://HOST:PORT on another machine. avoid: its engine gives no sign of
    life, so that others are preferred."""

    id: Text
    socket: Address
    version: Text
    state: Literal["open", "draining"]
    avoid: bool = False


class Canary(Struct, frozen=True):
    """Another version that takes a share of a model's requests. name: its own row. since_s: Unix time of its start,
    which identifies this canary."""

    name: Text
    share: Share
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
    an adapter; pins: the model that they serve under this further name, such as `m@v1` of `m`. owners: of keys for
    which it exists, None: for all; in a message their place in `audiences`. chats: False for one that is known to have
    no chat template.
    """

    name: Text = ""
    version: Text = ""
    task: Literal["generate", "embed"] = "generate"
    replicas: tuple[Replica, ...] = ()
    max_model_len: Limit | None = None
    slots: Limit | None = None
    host: Text = ""
    adapter: Text = ""
    pins: Text = ""
    canary: Canary | None = None
    trouble: StartFailure | None = None
    owners: frozenset[str] | int | None = None
    chats: bool = True


class Login(Struct, frozen=True):
    """A login of the page. until_s: Unix time of its end."""

    id: Id
    until_s: float


class Caller(Struct, frozen=True):
    """The row of a key. owner: all keys of a person have the same. models: the only ones it may call, None for all.
    spent_until_s: Unix time at which its used-up quota renews, None while quota is left; spent_quota: which one that
    is, in words; quota: tokens of the smaller of its quotas, None without one. expires_s: Unix time from which the key
    is refused, None: it lasts; of one that is over, a row with nothing else says when it ended. sessions: its logins by
    the SHA-256 of their tokens. secret: SHA-256 of its key, which has another one after a rotation."""

    id: Id
    scopes: frozenset[Scope] = frozenset()
    owner: str = ""
    models: frozenset[str] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    spent_until_s: float | None = None
    spent_quota: str = ""
    quota: Limit | None = None
    expires_s: float | None = None
    sessions: dict[Digest, Login] = {}
    secret: Digest = ""

    def has_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= now_s

    def sees(self, model: Model) -> bool:
        """Whether the model exists for this key; if not, the answer is the same as for a nonexistent model."""
        owners = model.owners
        return owners is None or (isinstance(owners, frozenset) and self.owner in owners) or ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        """A key that may use a model may use its versions by their names, `MODEL@VERSION`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


NOBODY: Final = Caller("")  # of a request without a key
THE_BOX: Final = Caller("", frozenset({ADMIN}), owner="box")  # asks what no key asked for, as a command on the box does


class Table(Struct, tag_field="type", tag="table"):
    """One generation of the routing table. models: by name; keys: by the SHA-256 of the key, in hex; audiences: owners
    who may call a model, once for all models that have them."""

    generation: int
    models: dict[Text, Model] = {}
    keys: dict[Digest, Caller] = {}
    audiences: list[frozenset[str]] = []


class Degraded(Struct, tag_field="type", tag="degraded"):
    """Parts of the box that fail and are tried again."""

    names: list[str]


_MESSAGES: Final = msgspec.json.Decoder(Table | Degraded)


def read_message(line: bytes) -> Table | Degraded:
    """Raises msgspec.DecodeError: not JSON; `ValidationError`, a kind of it: not one of these messages."""
    message = _MESSAGES.decode(line)
    if isinstance(message, Table):
        for name, model in message.models.items():
            owners = message.audiences[model.owners] if isinstance(model.owners, int) else model.owners
            message.models[name] = replace(model, name=name, owners=owners)
        for digest, key in message.keys.items():
            message.keys[digest] = replace(key, owner=key.owner or key.id, secret=digest)
    return message


@lru_cache(1024)
def cache_salt(owner: str, own: str = "") -> str:
    """The `cache_salt` of an owner's requests. own: the request's own salt, which separates it further."""
    return f"{_digest(owner)}.{_digest(own)}" if own else _digest(owner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
