"""Parses and checks the routing table that the controller sends over the bus as JSON into typed rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.gateway.core.errors import TableInvalid
from appliance.gateway.core.routes import ADMIN
from appliance.gateway.routing.router import DRAINING, OPEN, Canary, Model, Replica, Trouble

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_TASKS = ("generate", "embed")
_SCOPE = re.compile(r"[a-z_]{1,32}\Z")
_KEY_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_SHOWN_CHARACTERS = 300
ROWS_AT_ONCE = 500
"""Reading these takes some 2 ms."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request and its permissions.

    owner: of the key; all keys of a person have the same. models: the only ones it may call, None for all.
    requests_per_minute, tokens_per_minute: None for no limit. spent_until_s: Unix time at which its used-up quota
    renews, None while quota is left; spent_quota: which one that is, in words; quota: tokens of the smaller of its
    quotas, None without one. expires_s: Unix time from which the key is refused, None: it lasts. cache_salt: separates
    its owner's prefixes from other owners' in an engine's cache; salt_field: the same as a field of a request's body.
    secret: SHA-256 of its key, which has another one after a rotation.
    """

    id: str
    name: str
    scopes: frozenset[str]
    scopes_header: bytes
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    spent_until_s: float | None = None
    owner: str = ""
    cache_salt: bytes = b""
    salt_field: bytes = b""
    quota: int | None = None
    expires_s: float | None = None
    spent_quota: str = ""
    secret: bytes = b""

    def sees(self, model: Model) -> bool:
        """Whether the model exists for this key; if not, the answer is the same as for a nonexistent model."""
        return model.owners is None or self.owner in model.owners or ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        """A key that may use a model may use its versions by their names, `MODEL@VERSION`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


@dataclass(frozen=True, slots=True)
class Session:
    """A login of the page. caller: of its key. until_s: Unix time of its end."""

    id: str
    caller: Caller
    until_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """One generation of the routing table. keys: SHA-256 of the key (lower-case hex) -> its owner. refused: errors of
    rows, or parts of rows, left out. sessions: SHA-256 of a login's token -> the login. expired: SHA-256 of a key whose
    time is over -> since when, Unix time."""

    generation: int
    models: tuple[Model, ...]
    keys: Mapping[str, Caller]
    refused: tuple[str, ...] = ()
    sessions: Mapping[str, Session] = field(default_factory=dict)
    expired: Mapping[str, float] = field(default_factory=dict)


def parsing(data: Mapping[str, Any], *, default_hold_s: float) -> Iterator[Table | None]:
    """Check a "table" message: yields None after every ROWS_AT_ONCE rows, and the table at last. 50,000 names in one go
    held the loop that sends tokens for a quarter of a second. An error in one row skips only that row: the others, and
    above all the removal of keys, take effect. Raises TableInvalid if the message has no usable rows.
    """
    generation = data.get("generation")
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise TableInvalid(f"generation: {generation!r} given, expected an integer")
    models = _object(data.get("models", {}), "models")
    keys = _object(data.get("keys", {}), "keys")
    refused: list[str] = []
    audiences = _audiences(data.get("audiences"))
    rows: list[Model] = []
    seen = 0
    for name, row in models.items():
        seen += 1
        if seen % ROWS_AT_ONCE == 0:
            yield None
        try:
            rows.append(_model(name, row, default_hold_s, refused, audiences))
        except TableInvalid as error:
            refused.append(_shown(error))
    callers: dict[str, Caller] = {}
    sessions: dict[str, Session] = {}
    expired: dict[str, float] = {}
    for digest, row in keys.items():
        seen += 1
        if seen % ROWS_AT_ONCE == 0:
            yield None
        try:
            if isinstance(row, dict) and (since_s := _moment(row.get("expired_s"), f"keys.{digest[:8]}….expired_s")):
                expired[digest] = since_s
                continue
            callers[digest] = caller = _caller(digest, row)
            sessions |= _sessions(f"keys.{digest[:8]}….sessions", row.get("sessions"), caller)
        except TableInvalid as error:
            refused.append(_shown(error))
    yield Table(
        generation,
        tuple(rows),
        callers,
        tuple(refused),
        sessions,
        expired,
    )


def _audiences(value: Any) -> list[frozenset[str]]:
    """Owners who may call a model, for all its names at once."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TableInvalid(f"audiences: {type(value).__name__} given, expected a list")
    return [_owners(one, f"audiences.{place}", []) or frozenset() for place, one in enumerate(value)]


def _shown(error: TableInvalid) -> str:
    text = str(error)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _model(name: str, row: Any, default_hold_s: float, refused: list[str], audiences: list[frozenset[str]]) -> Model:
    where = f"models.{name}"
    row = _object(row, where)
    task = _given(row, "task", "generate")
    if task not in _TASKS:
        raise TableInvalid(f"{where}.task: {task!r} given, expected one of {', '.join(_TASKS)}")
    hold_s = row.get("hold_s")
    if hold_s is None:
        hold_s = default_hold_s
    if not isinstance(hold_s, int | float) or isinstance(hold_s, bool) or not hold_s >= 0:
        raise TableInvalid(f"{where}.hold_s: {hold_s!r} given, expected seconds >= 0")
    replicas = row.get("replicas", [])
    if not isinstance(replicas, list):
        raise TableInvalid(f"{where}.replicas: {type(replicas).__name__} given, expected a list")
    version = _text(_given(row, "version", ""), f"{where}.version")
    max_model_len = row.get("max_model_len")
    if max_model_len is not None and (type(max_model_len) is not int or max_model_len < 1):
        raise TableInvalid(f"{where}.max_model_len: {max_model_len!r} given, expected a number of tokens or null")
    sound: list[Replica] = []
    for i, item in enumerate(replicas):
        try:
            sound.append(_replica(f"{where}.replicas.{i}", item, version))
        except TableInvalid as error:
            refused.append(_shown(error))
    canary, trouble = None, None
    try:
        canary = _canary(f"{where}.canary", row.get("canary"))
        trouble = _trouble(f"{where}.trouble", row.get("trouble"))
    except TableInvalid as error:
        refused.append(_shown(error))
    return Model(
        name,
        version,
        _text(_given(row, "state", "cold"), f"{where}.state"),
        task,
        float(hold_s),
        tuple(sound),
        max_model_len,
        _text(_given(row, "adapter", ""), f"{where}.adapter"),
        canary,
        trouble,
        _owners(row.get("owners"), f"{where}.owners", audiences),
        row.get("chats") is not False,
    )


def _owners(value: Any, where: str, audiences: list[frozenset[str]]) -> frozenset[str] | None:
    """`value`: the owners, or their place in `audiences`."""
    # Never in a header line: any text will do, as for the owner of a key.
    if value is None:
        return None
    if type(value) is int and 0 <= value < len(audiences):
        return audiences[value]
    if not isinstance(value, list) or not all(isinstance(owner, str) for owner in value):
        raise TableInvalid(f"{where}: {value!r} given, expected a list of owners or null")
    return frozenset(value)


def _canary(where: str, row: Any) -> Canary | None:
    if row is None:
        return None
    row = _object(row, where)
    share, since_s = row.get("share"), row.get("since_s")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise TableInvalid(f"{where}.share: {share!r} given, expected a part from 0 to 1")
    if not isinstance(since_s, int | float) or isinstance(since_s, bool):
        raise TableInvalid(f"{where}.since_s: {since_s!r} given, expected seconds since 1970")
    return Canary(_text(row.get("name"), f"{where}.name"), float(share), float(since_s))


def _trouble(where: str, row: Any) -> Trouble | None:
    if row is None:
        return None
    row = _object(row, where)
    for name in ("next_try_s", "hold_before_s"):
        if not isinstance(row.get(name), int | float) or isinstance(row.get(name), bool):
            raise TableInvalid(f"{where}.{name}: {row.get(name)!r} given, expected seconds")
    # It goes into an answer's JSON body, so any text is allowed.
    return Trouble(str(row.get("reason")), float(row["next_try_s"]), float(row["hold_before_s"]))


def _replica(where: str, row: Any, model_version: str) -> Replica:
    row = _object(row, where)
    state = row.get("state")
    if state not in (OPEN, DRAINING):
        raise TableInvalid(f"{where}.state: {state!r} given, expected {OPEN} or {DRAINING}")
    socket = _text(row.get("socket"), f"{where}.socket")
    if not socket.startswith("/"):
        raise TableInvalid(f"{where}.socket: {socket!r} given, expected an absolute path")
    version = row.get("version")
    return Replica(
        _text(row.get("id"), f"{where}.id"),
        socket,
        model_version if version is None else _text(version, f"{where}.version"),
        state,
        row.get("avoid") is True,
    )


def _caller(digest: str, row: Any) -> Caller:
    where = f"keys.{digest[:8]}…"
    if not _SHA256.match(digest):
        raise TableInvalid(f"{where}: expected 64 lower-case hex digits of a SHA-256")
    row = _object(row, where)
    scopes = row.get("scopes", [])
    if not isinstance(scopes, list):
        raise TableInvalid(f"{where}.scopes: {type(scopes).__name__} given, expected a list")
    # Never in a header line, so any text is allowed. Without an owner from the controller each key is its own.
    owner = str(_given(row, "owner", row.get("id")))
    for scope in scopes:
        # A comma would split it in the header, and gateways use this name for themselves.
        if not isinstance(scope, str) or not _SCOPE.match(scope) or scope == "gateway":
            raise TableInvalid(f"{where}.scopes: {scope!r} given, expected a scope's name")
    names: list[str] = list(scopes)
    id = row.get("id")
    if not isinstance(id, str) or not _KEY_ID.match(id):
        raise TableInvalid(f"{where}.id: {id!r} given, expected letters, digits and _ . : -")
    salt = cache_salt(owner).encode()
    return Caller(
        id,
        str(_given(row, "name", "")),
        frozenset(names),
        ",".join(names).encode(),
        _models(row.get("models"), f"{where}.models"),
        _limit(row.get("requests_per_minute"), f"{where}.requests_per_minute"),
        _limit(row.get("tokens_per_minute"), f"{where}.tokens_per_minute"),
        _moment(row.get("spent_until_s"), f"{where}.spent_until_s"),
        owner,
        salt,
        salt_field(salt),
        _limit(row.get("quota"), f"{where}.quota"),
        _moment(row.get("expires_s"), f"{where}.expires_s"),
        str(_given(row, "spent_quota", "")),
        digest.encode(),
    )


def _sessions(where: str, rows: Any, caller: Caller) -> dict[str, Session]:
    found: dict[str, Session] = {}
    for digest, row in _object({} if rows is None else rows, where).items():
        row = _object(row, where)
        id, until_s = row.get("id"), _moment(row.get("until_s"), f"{where}.until_s")
        if not _SHA256.match(digest) or not isinstance(id, str) or not _KEY_ID.match(id) or until_s is None:
            raise TableInvalid(f"{where}: {id!r} given, expected an id and its end by the SHA-256 of its token")
        found[digest] = Session(id, caller, float(until_s))
    return found


def cache_salt(owner: str, own: str = "") -> str:
    """The `cache_salt` of an owner's requests. own: the request's own salt, which separates it further."""
    return f"{_digest(owner)}.{_digest(own)}" if own else _digest(owner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def salt_field(salt: bytes) -> bytes:
    """A `cache_salt` as a field to be added to a body (request_check.with_fields)."""
    return b',"cache_salt":"%b"' % salt


def _models(value: Any, where: str) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise TableInvalid(f"{where}: {type(value).__name__} given, expected a list of names or null")
    # Compared and never sent, so any text is allowed. (One odd name here once froze the tables of all gateways.)
    return frozenset(name for name in value if isinstance(name, str))


def _limit(value: Any, where: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise TableInvalid(f"{where}: {value!r} given, expected a number of at least 1 or null")
    return value


def _moment(value: Any, where: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TableInvalid(f"{where}: {value!r} given, expected seconds since 1970 or null")
    return value


def _given(row: Mapping[str, Any], name: str, default: Any) -> Any:
    value = row.get(name)
    return default if value is None else value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TableInvalid(f"{where}: {type(value).__name__} given, expected an object")
    return value


def _text(value: Any, where: str) -> str:
    # These end up in header lines: a control character here would be a header injection.
    if not isinstance(value, str) or not value.isprintable() or not value.isascii():
        raise TableInvalid(f"{where}: {value!r} given, expected printable ASCII text")
    return value
