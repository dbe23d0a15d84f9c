"""The messages that the controller sends over the bus, as types: the routing table and the box's troubles.

What becomes part of a header line is printable ASCII: a control character there would be a header injection.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct, ValidationError

from appliance.gateway.core.routes import ADMIN

OPEN = "open"

_SHA256: Final = r"\A[0-9a-f]{64}\Z"
_SHOWN_CHARACTERS: Final = 300
Text = Annotated[str, Meta(pattern=r"\A[ -~]*\Z")]
Address = Annotated[str, Meta(pattern=r"\A(/|https://)[ -~]*\Z")]
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.:-]{1,128}\Z")]
# A comma would split it in the header, and gateways use the name `gateway` for themselves.
Scope = Annotated[str, Meta(pattern=r"\A(?!gateway\Z)[a-z_]{1,32}\Z")]
Digest = Annotated[str, Meta(pattern=_SHA256)]
Limit = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Replica(Struct, frozen=True):
    """One replica in one model's row. socket: path of its Unix socket, or https://HOST:PORT on another machine. avoid:
    its engine gives no sign of life, so that others are preferred."""

    id: Text
    socket: Address
    version: Text
    state: Literal["open", "draining"]
    avoid: bool = False


class Canary(Struct, frozen=True):
    """Another version that takes a share of a model's requests.

    name: its own row. since_s: its start in seconds since 1970, which identifies this canary.
    """

    name: Text
    share: Share
    since_s: float


class Trouble(Struct, frozen=True):
    """Why no replica of a model starts.

    next_try_s: in seconds since 1970. hold_before_s: requests wait for the next try if it is at most this far away.
    """

    reason: str
    next_try_s: float
    hold_before_s: float


class Model(Struct, frozen=True):
    """One model's row.

    hold_s: how long its requests may wait for a replica to wake. max_model_len: context of its engines in tokens;
    slots: sequences that one of them computes at once; None where unknown. host: the model whose engines serve it,
    empty where they are its own. adapter: the name by which they know it, empty where they serve the model itself.
    owners: of keys for which it exists, None: for all; in a message their place in `audiences`. chats: False for one
    that is known to have no chat template.
    """

    name: Text = ""
    version: Text = ""
    task: Literal["generate", "embed"] = "generate"
    hold_s: Seconds = math.inf
    replicas: tuple[Replica, ...] = ()
    max_model_len: Limit | None = None
    slots: Limit | None = None
    host: Text = ""
    adapter: Text = ""
    canary: Canary | None = None
    trouble: Trouble | None = None
    owners: frozenset[str] | int | None = None
    chats: bool = True


class Login(Struct, frozen=True):
    """A login of the page. until_s: Unix time of its end."""

    id: Id
    until_s: float


class Caller(Struct, frozen=True):
    """The origin of a request and its permissions: the row of a key.

    owner: of the key; all keys of a person have the same. models: the only ones it may call, None for all.
    requests_per_minute, tokens_per_minute: None for no limit. spent_until_s: Unix time at which its used-up quota
    renews, None while quota is left; spent_quota: which one that is, in words; quota: tokens of the smaller of its
    quotas, None without one. expires_s: Unix time from which the key is refused, None: it lasts; of one that is over, a
    row with nothing else says when it ended. sessions: its logins
    by the SHA-256 of their tokens. secret: SHA-256 of its key, which has another one after a rotation.
    """

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
        """now_s: Unix time."""
        return self.expires_s is not None and self.expires_s <= now_s

    def sees(self, model: Model) -> bool:
        """Whether the model exists for this key; if not, the answer is the same as for a nonexistent model."""
        owners = model.owners
        return owners is None or (isinstance(owners, frozenset) and self.owner in owners) or ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        """A key that may use a model may use its versions by their names, `MODEL@VERSION`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


NOBODY: Final = Caller("")
"""Of a request without a key."""
THE_BOX: Final = Caller("", frozenset({ADMIN}), owner="box")
"""Work that no key asked for, as a command on the box itself begins it."""


@dataclass(slots=True)
class Table:
    """One generation of the routing table. keys: by the SHA-256 of the key, in hex. refused: errors of rows left out.
    sessions: logins with the callers that they stand for, by the SHA-256 of the login's token."""

    generation: int
    models: list[Model] = field(default_factory=list)
    keys: dict[str, Caller] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    sessions: dict[str, tuple[Login, Caller]] = field(default_factory=dict)


class Degraded(Struct, tag_field="type", tag="degraded"):
    """Parts of the box that fail and are tried again."""

    names: list[str]


class _TableMessage(Struct, tag_field="type", tag="table"):
    """audiences: owners who may call a model, once for all models that have them."""

    generation: int
    models: dict[str, Raw] = {}
    keys: dict[str, Raw] = {}
    audiences: list[frozenset[str]] = []


_MESSAGES: Final = msgspec.json.Decoder(_TableMessage | Degraded)
_MODELS: Final = msgspec.json.Decoder(Model)
_KEYS: Final = msgspec.json.Decoder(Caller)


def read_message(line: bytes) -> Table | Degraded:
    """Decode a message. An error in one row skips only that row: the others, and above all the removal of keys, take
    effect.

    Raises:
        msgspec.DecodeError: not JSON; `ValidationError`, a kind of it: not one of these messages.
    """
    message = _MESSAGES.decode(line)
    if isinstance(message, Degraded):
        return message
    table = Table(message.generation)
    for name, row in message.models.items():
        try:
            table.models.append(_model(name, row, message.audiences))
        except (ValidationError, IndexError) as error:
            table.refused.append(f"models.{name}: {error}"[:_SHOWN_CHARACTERS])
    for digest, row in message.keys.items():
        try:
            _add_key(table, digest, row)
        except ValidationError as error:
            table.refused.append(f"keys.{digest[:8]}…: {error}")
    return table


def _model(name: str, row: Raw, audiences: list[frozenset[str]]) -> Model:
    model = _MODELS.decode(row)
    owners = audiences[model.owners] if isinstance(model.owners, int) else model.owners
    return msgspec.structs.replace(model, name=name, owners=owners)


def _add_key(table: Table, digest: str, row: Raw) -> None:
    if not re.match(_SHA256, digest):
        raise ValidationError("expected the SHA-256 of a key in lower-case hex")
    key = _KEYS.decode(row)
    table.keys[digest] = caller = msgspec.structs.replace(key, owner=key.owner or key.id, secret=digest)
    for token, login in key.sessions.items():
        table.sessions[token] = login, caller


@lru_cache(1024)
def cache_salt(owner: str, own: str = "") -> str:
    """The `cache_salt` of an owner's requests. own: the request's own salt, which separates it further."""
    return f"{_digest(owner)}.{_digest(own)}" if own else _digest(owner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
