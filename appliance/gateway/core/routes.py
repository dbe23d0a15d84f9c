"""Defines which URLs exist, who may call them and where they go. Pure; an allowlist, so engines stay private."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.gateway.core import errors

INFERENCE, FINE_TUNING, ADMIN, READ, METRICS = "inference", "fine_tuning", "admin", "read", "metrics"
RESPONSES, INPUT_TOKENS = "responses", "responses.input_tokens"
MESSAGES, COUNT_TOKENS = "messages", "messages.count_tokens"
# Where the prompt is; elsewhere it is the input.
PROMPT_FIELDS = {
    "completions": "prompt",
    "chat.completions": "messages",
    MESSAGES: "messages",
    COUNT_TOKENS: "messages",
}


class Kind(enum.Enum):
    INFERENCE = "inference"
    CONTROL = "control"
    HEALTH = "health"
    METRICS = "metrics"
    PAGE = "page"
    LOGIN = "login"
    UNKNOWN = "unknown"


# All others need a key, or a login of the page.
KEYLESS = frozenset({Kind.HEALTH, Kind.PAGE, Kind.LOGIN})


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allowlist.

    scopes: any one of them (or admin) suffices. task: required task of the model. stream_end: last bytes of a complete
    SSE stream of this route, None without a fixed ending. engine_path: for inference. converses: it needs the model's
    chat template. upload: bodies may be as large as a file. page: the box's own page uses it, so that a login of the
    page does in place of a key.
    """

    name: str
    kind: Kind
    methods: frozenset[bytes]
    scopes: frozenset[str]
    urls: re.Pattern[bytes]
    task: str | None = None
    stream_end: bytes | None = None
    engine_path: bytes = b""
    converses: bool = False
    upload: bool = False
    page: bool = False


_INF = frozenset({INFERENCE})
_TUNE = frozenset({FINE_TUNING})
_ADMIN = frozenset({ADMIN})
_READ_MODELS = frozenset({INFERENCE, FINE_TUNING, READ})
_ANY = frozenset({ADMIN, READ, METRICS, INFERENCE, FINE_TUNING})
_NOBODY = frozenset[str]()
_DONE = b"data: [DONE]\n\n"


def _urls(pattern: str) -> re.Pattern[bytes]:
    """`/a`: this URL; `/a/*`: those below it; `/a/**`: it and those below it; `/a/*/b`: those below it that end so."""
    return re.compile(pattern.replace("/**", "(?:/.+)?").replace("/*", "/.+").encode(), re.DOTALL)


def _inference(url: str, name: str, task: str, stream_end: bytes | None, engine_path: str = "") -> Route:
    return Route(
        name,
        Kind.INFERENCE,
        frozenset({b"POST"}),
        _INF,
        _urls(url),
        task,
        stream_end,
        engine_path=(engine_path or url).encode(),
        converses=task == "generate" and name != "completions",
        page=name == "chat.completions",
    )


def _other(
    kind: Kind, methods: str, url: str, scopes: frozenset[str], name: str, *, upload: bool = False, page: bool = False
) -> Route:
    return Route(name, kind, frozenset(methods.encode().split()), scopes, _urls(url), upload=upload, page=page)


def _control(
    methods: str, url: str, scopes: frozenset[str], name: str = "", *, upload: bool = False, page: bool = True
) -> Route:
    name = name or url.partition("/*")[0].rpartition("/")[2]
    return _other(Kind.CONTROL, methods, url, scopes, name, upload=upload, page=page)


# The route of a request until its own is known.
UNKNOWN = _other(Kind.UNKNOWN, "", "", _NOBODY, "unknown")
# Browsers are sent to the page from here; for programs it is an unknown URL.
FRONT_DOOR = b"/"
ROTATION = _control("POST", "/admin/v1/*/rotate", _ADMIN, "admin")
SESSIONS = _control("GET POST DELETE", "/admin/v1/sessions/**", _ANY)
_KEPT = "stored completions"

# The first row whose URLs and methods match.
ROUTES: tuple[Route, ...] = (
    _inference("/v1/chat/completions", "chat.completions", "generate", _DONE),
    _inference("/v1/completions", "completions", "generate", _DONE),
    _inference("/v1/responses", RESPONSES, "generate", None),
    _inference("/v1/responses/input_tokens", INPUT_TOKENS, "generate", None, "/v1/responses/render"),
    _inference("/v1/messages", MESSAGES, "generate", b'"type":"message_stop"}\n\n'),
    _inference("/v1/messages/count_tokens", COUNT_TOKENS, "generate", None),
    _inference("/v1/embeddings", "embeddings", "embed", None),
    _other(Kind.HEALTH, "GET", "/health", _NOBODY, "health"),
    _other(Kind.METRICS, "GET", "/metrics", frozenset({ADMIN, READ, METRICS}), "metrics"),
    # The page's files need no key; its requests do.
    _other(Kind.PAGE, "GET", "/ui/**", _NOBODY, "page"),
    _other(Kind.PAGE, "GET", "/", _NOBODY, "page"),
    # The page's way to a login provider and back, before anybody has a key or a login.
    _other(Kind.LOGIN, "GET", "/admin/v1/oidc", _NOBODY, "login", page=True),
    _other(Kind.LOGIN, "POST", "/admin/v1/oidc/(?:begin|finish)", _NOBODY, "login", page=True),
    _control("GET", "/v1/chat/completions/**", _INF, _KEPT, page=False),
    _control("POST DELETE", "/v1/chat/completions/*", _INF, _KEPT, page=False),
    _control("GET DELETE", "/v1/responses/*", _INF, "stored responses", page=False),
    _control("POST", "/v1/responses/*/cancel", _INF, "stored responses", page=False),
    _control("GET POST DELETE", "/v1/files/**", _TUNE, upload=True),
    _control("GET POST DELETE", "/v1/uploads/**", _TUNE, upload=True, page=False),
    _control("GET POST DELETE", "/v1/fine_tuning/**", _TUNE),
    _control("GET POST", "/v1/batches/**", _INF),
    _control("GET POST DELETE", "/v1/evals/**", _TUNE),
    _control("GET", "/v1/gates/**", _TUNE),
    _control("POST", "/v1/gates/*/cancel", _TUNE),
    _control("GET POST DELETE", "/v1/pipelines/**", _TUNE),
    _control("GET POST", "/v1/sweeps/**", _TUNE),
    _control("GET", "/v1/pipeline_runs/**", _TUNE),
    _control("POST", "/v1/pipeline_runs/*/cancel", _TUNE),
    _control("GET", "/v1/models/**", _READ_MODELS),
    _control("DELETE", "/v1/models/*", _TUNE),
    _control("POST", "/v1/models/*/share", _TUNE),
    # The controller shows each key only the usage and events that it may see.
    _control("GET", "/admin/v1/(?:usage|events)", frozenset({ADMIN, READ, INFERENCE, FINE_TUNING}), "admin"),
    _control("GET", "/admin/v1/me", _ANY),
    SESSIONS,
    ROTATION,
    _control("GET", "/admin/v1/**", frozenset({ADMIN, READ}), "admin"),
    _control("POST PUT PATCH DELETE", "/admin/v1/**", _ADMIN, "admin"),
)

_ANTHROPIC = re.compile(rb"/v1/messages(?:/|\Z)")
# No dot segments, no empty segments, no backslash, neither plain nor percent-encoded, and no fragment, which the
# controller's parser cuts off: the path that is checked here must be the path that the controller routes.
_SLASHES = re.compile(rb"//+")
_UNSAFE_PATH = re.compile(
    rb"(?:/|%2f)(?:\.|%2e){1,2}(?:/|%2f|$)|//|\\|%5c|%0[0-9a-f]|%1[0-9a-f]|%7f|#|[^\x21-\x7e]", re.IGNORECASE
)


def is_anthropic(path: bytes) -> bool:
    """Whether a URL is one of Anthropic's API, whose answers have its shapes and headers."""
    return _ANTHROPIC.match(path) is not None


def plain_target(target: bytes) -> bytes:
    """A request's target without the empty segments and the last slash of its path, which base URLs with one slash too
    many bring; what is checked and what the controller routes is what this returns."""
    path, mark, query = target.partition(b"?")
    if path.find(b"//") >= 0:
        path = _SLASHES.sub(b"/", path)
    if path.endswith(b"/") and len(path) > 1:
        path = path[:-1]
    return b"%b%b%b" % (path, mark, query)


def resolve(method: bytes, path: bytes) -> Route:
    """The route of `method` on `path` (raw bytes, without the query).

    Raises HttpError 404 for a URL that is not on the list and 405 for a method that its URL does not take.
    """
    taken: set[bytes] = set()
    for route in _at(path):
        if method in route.methods:
            return route
        taken |= route.methods
    if not taken:
        raise errors.unknown_url(_shown(method), _shown(path), _shown(_meant(path)))
    allowed = b", ".join(sorted(taken | ({b"HEAD"} if b"GET" in taken else set()))).decode()
    raise errors.HttpError(
        405,
        f"Not allowed to {_shown(method)} on {_shown(path)}. Allowed: {allowed}.",
        code="method_not_supported",
        allow=allowed,
    )


def _at(path: bytes) -> Iterator[Route]:
    if not _UNSAFE_PATH.search(path):
        yield from (route for route in ROUTES if route.urls.fullmatch(path))


def _meant(path: bytes) -> bytes:
    """The URL that there is for one with a /v1 too few or too many; empty where neither is the fault."""
    meant = path[3:] if path.startswith(b"/v1/v1/") else b"/v1%b" % path
    return meant if any(_at(meant)) else b""


def _shown(raw: bytes) -> str:
    return raw[:200].decode("ascii", "replace")
