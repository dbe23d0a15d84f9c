"""Defines which URLs exist, who may call them and where they go. Pure; an allowlist, so engines stay private."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

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
    PREFLIGHT = "preflight"
    PAGE = "page"
    LOGIN = "login"


# All others need a key, or a login of the page.
KEYLESS = frozenset({Kind.HEALTH, Kind.PREFLIGHT, Kind.PAGE, Kind.LOGIN})


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allowlist.

    scopes: any one of them (or admin) suffices. task: required task of the model. stream_end: last bytes of a complete
    SSE stream of this route, None without a fixed ending. converses: it needs the model's chat template. upload: bodies
    may be as large as a file. engine_path: for inference.

    The `path` of a CONTROL or PAGE route includes all URLs below it. posts_to: only URLs with this ending accept POST,
    others do not exist. narrower: rows that replace this one if their method and URL match; `ending` and `below` (never
    the path itself) select the URLs; of a URL of EXACT the method alone does. page: the box's own page uses it, so that
    a login of the page does in place of a key.
    """

    name: str
    kind: Kind
    methods: frozenset[bytes]
    scopes: frozenset[str]
    path: bytes = b""
    task: str | None = None
    stream_end: bytes | None = None
    upload: bool = False
    engine_path: bytes = b""
    posts_to: bytes = b""
    narrower: tuple[Route, ...] = ()
    ending: bytes = b""
    below: bool = False
    converses: bool = False
    page: bool = False


_POST = frozenset({b"POST"})
_GET = frozenset({b"GET"})
_INF = frozenset({INFERENCE})
_TUNE = frozenset({FINE_TUNING})
_READ_MODELS = frozenset({INFERENCE, FINE_TUNING, READ})
_DONE = b"data: [DONE]\n\n"


def _inference(path: str, name: str, task: str, stream_end: bytes | None, engine_path: str = "") -> Route:
    asked = (engine_path or path).encode()
    converses = task == "generate" and name != "completions"
    page = name == "chat.completions"
    return Route(
        name,
        Kind.INFERENCE,
        _POST,
        _INF,
        path.encode(),
        task,
        stream_end,
        engine_path=asked,
        converses=converses,
        page=page,
    )


EXACT: dict[bytes, Route] = {
    route.path: route
    for route in (
        _inference("/v1/chat/completions", "chat.completions", "generate", _DONE),
        _inference("/v1/completions", "completions", "generate", _DONE),
        _inference("/v1/responses", RESPONSES, "generate", None),
        _inference("/v1/responses/input_tokens", INPUT_TOKENS, "generate", None, "/v1/responses/render"),
        _inference("/v1/messages", MESSAGES, "generate", b'"type":"message_stop"}\n\n'),
        _inference("/v1/messages/count_tokens", COUNT_TOKENS, "generate", None),
        _inference("/v1/embeddings", "embeddings", "embed", None),
        Route("health", Kind.HEALTH, _GET, frozenset(), b"/health"),
        Route("metrics", Kind.METRICS, _GET, frozenset({ADMIN, READ, METRICS}), b"/metrics"),
    )
}

# The box's own page and its files: the same for everybody, so without a key. What they ask for has one.
PAGE = Route("page", Kind.PAGE, _GET, frozenset(), b"/ui")

# Whoever types the box's address into a browser is sent to the page; to programs it is an unknown URL.
FRONT_DOOR = Route("page", Kind.PAGE, _GET, frozenset(), b"/")

# The page's way to a login provider and back, before anybody has a key or a login.
EXACT |= {
    path: Route("login", Kind.LOGIN, methods, frozenset(), path, page=True)
    for path, methods in (
        (b"/admin/v1/oidc", _GET),
        (b"/admin/v1/oidc/begin", _POST),
        (b"/admin/v1/oidc/finish", _POST),
    )
}

# What a browser asks before a page's request; any URL, since the request itself is checked when it comes.
PREFLIGHT = Route("preflight", Kind.PREFLIGHT, frozenset({b"OPTIONS"}), frozenset())
_ANTHROPIC = b"/v1/messages"


def is_anthropic(path: bytes) -> bool:
    """Whether a URL is one of Anthropic's API, whose answers have its shapes and headers."""
    return path.startswith(_ANTHROPIC) and path[len(_ANTHROPIC) : len(_ANTHROPIC) + 1] in (b"", b"/")


_USAGE, _ME, _EVENTS = b"/admin/v1/usage", b"/admin/v1/me", b"/admin/v1/events"
_ANY = frozenset({ADMIN, READ, METRICS, INFERENCE, FINE_TUNING})


def _control(
    path: str,
    methods: str,
    scopes: frozenset[str],
    *,
    name: str = "",
    upload: bool = False,
    posts_to: bytes = b"",
    narrower: tuple[Route, ...] = (),
    ending: bytes = b"",
    below: bool = False,
    page: bool = True,
) -> Route:
    taken = frozenset(method.encode() for method in methods.split())
    shown = name or path.rpartition("/")[2]
    return Route(
        shown,
        Kind.CONTROL,
        taken,
        scopes,
        path.encode(),
        upload=upload,
        posts_to=posts_to,
        narrower=narrower,
        ending=ending,
        below=below,
        page=page,
    )


# Its POST is inference.
_COMPLETIONS, _KEPT = "/v1/chat/completions", "stored completions"
_ASKED = EXACT[_COMPLETIONS.encode()]
EXACT[_ASKED.path] = replace(_ASKED, narrower=(_control(_COMPLETIONS, "GET", _INF, name=_KEPT, page=False),))
ROTATION = _control("/admin/v1", "POST", frozenset({ADMIN}), name="admin", ending=b"/rotate")
SESSIONS = _control("/admin/v1/sessions", "GET POST DELETE", _ANY)
CONTROL: tuple[Route, ...] = (
    _control("/v1/files", "GET POST DELETE", _TUNE, upload=True),
    _control("/v1/uploads", "GET POST DELETE", _TUNE, upload=True, page=False),
    _control("/v1/fine_tuning", "GET POST DELETE", _TUNE),
    _control("/v1/batches", "GET POST", _INF),
    _control("/v1/evals", "GET POST DELETE", _TUNE),
    _control("/v1/gates", "GET POST", _TUNE, posts_to=b"/cancel"),
    _control("/v1/pipelines", "GET POST DELETE", _TUNE),
    _control("/v1/sweeps", "GET POST", _TUNE),
    _control("/v1/pipeline_runs", "GET POST", _TUNE, posts_to=b"/cancel"),
    _control("/v1/responses", "GET POST DELETE", _INF, name="stored responses", posts_to=b"/cancel", page=False),
    _control(_COMPLETIONS, "GET POST DELETE", _INF, name=_KEPT, page=False),
    _control(
        "/v1/models",
        "GET",
        _READ_MODELS,
        narrower=(
            _control("/v1/models", "DELETE", _TUNE, below=True),
            _control("/v1/models", "POST", _TUNE, ending=b"/share"),
        ),
    ),
    SESSIONS,
    _control(
        "/admin/v1",
        "GET POST PUT PATCH DELETE",
        frozenset({ADMIN}),
        name="admin",
        narrower=(_control("/admin/v1", "GET", frozenset({ADMIN, READ}), name="admin"), ROTATION),
    ),
)

_ROOTS: tuple[Route, ...] = (*CONTROL, PAGE)

# It goes by its whole URL: a model may be called `usage`, and what is below /admin/v1 stays as it is. Whose usage a
# key sees, and what it hears of, is the controller's to say.
EXACT[_USAGE] = _control(_USAGE.decode(), "GET", frozenset({ADMIN, READ, INFERENCE, FINE_TUNING}))
EXACT[_EVENTS] = _control(_EVENTS.decode(), "GET", frozenset({ADMIN, READ, INFERENCE, FINE_TUNING}))
EXACT[_ME] = _control(_ME.decode(), "GET", _ANY)

# No dot segments, no empty segments, no backslash, neither plain nor percent-encoded, and no fragment, which the
# controller's parser cuts off: the path that is checked here must be the path that the controller routes.
_SLASHES = re.compile(rb"//+")
_UNSAFE_PATH = re.compile(
    rb"(?:/|%2f)(?:\.|%2e){1,2}(?:/|%2f|$)|//|\\|%5c|%0[0-9a-f]|%1[0-9a-f]|%7f|#|[^\x21-\x7e]", re.IGNORECASE
)


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
    route = EXACT.get(path)
    if route is None:
        route = _below(method, path)
    if method not in route.methods:
        others = route.narrower if path in EXACT else ()  # `_below` has looked at the others of its rows
        for other in others:
            if method in other.methods:
                return other
        taken = route.methods.union(*(other.methods for other in others))
        reads = {b"HEAD"} if b"GET" in taken else set()
        allowed = b", ".join(sorted(taken | reads)).decode()
        raise errors.method_not_allowed(_shown(method), _shown(path), allowed)
    return route


def _below(method: bytes, path: bytes) -> Route:
    if path == FRONT_DOOR.path and method in FRONT_DOOR.methods:
        return FRONT_DOOR
    for route in _ROOTS:
        size = len(route.path)
        if path.startswith(route.path) and (len(path) == size or path[size] == 0x2F):
            if _UNSAFE_PATH.search(path) or (method == b"POST" and not path.endswith(route.posts_to)):
                break
            for narrower in route.narrower:
                suits = path.endswith(narrower.ending) and (len(path) > size + 1 or not narrower.below)
                if method in narrower.methods and suits:
                    return narrower
            return route
    raise errors.unknown_url(_shown(method), _shown(path), _shown(_meant(path)))


def _meant(path: bytes) -> bytes:
    """The URL that there is for one with a /v1 too few or too many; empty where neither is the fault."""
    meant = path[3:] if path.startswith(b"/v1/v1/") else b"/v1%b" % path
    known = meant in EXACT or any(meant == route.path or meant.startswith(b"%b/" % route.path) for route in CONTROL)
    return meant if known and not _UNSAFE_PATH.search(path) else b""


def _shown(raw: bytes) -> str:
    return raw[:200].decode("ascii", "replace")
