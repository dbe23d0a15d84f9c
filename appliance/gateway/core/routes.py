"""Which URLs exist here, who may call them and where they go. Pure; an allowlist, so engines stay private."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from appliance.gateway.core import errors

INFERENCE, FINE_TUNING, ADMIN, READ, METRICS = "inference", "fine_tuning", "admin", "read", "metrics"
RESPONSES, INPUT_TOKENS = "responses", "responses.input_tokens"


class Kind(enum.Enum):
    INFERENCE = "inference"
    CONTROL = "control"
    HEALTH = "health"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allowlist.

    scopes: any one of them (or admin) suffices. task: what the model must do. stream_end: bytes that a
    complete SSE stream of this route ends with, None where no fixed ending exists. engine_path: of inference.
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


_POST = frozenset({b"POST"})
_GET = frozenset({b"GET"})
_INF = frozenset({INFERENCE})
_TUNE = frozenset({FINE_TUNING})
_READ_MODELS = frozenset({INFERENCE, FINE_TUNING, READ})
_DONE = b"data: [DONE]\n\n"


def _inference(path: str, name: str, task: str, stream_end: bytes | None, engine_path: str = "") -> Route:
    asked = (engine_path or path).encode()
    return Route(name, Kind.INFERENCE, _POST, _INF, path.encode(), task, stream_end, engine_path=asked)


_EXACT: dict[bytes, Route] = {
    route.path: route
    for route in (
        _inference("/v1/chat/completions", "chat.completions", "generate", _DONE),
        _inference("/v1/completions", "completions", "generate", _DONE),
        _inference("/v1/responses", RESPONSES, "generate", None),
        _inference("/v1/responses/input_tokens", INPUT_TOKENS, "generate", None, "/v1/responses/render"),
        _inference("/v1/messages", "messages", "generate", b'"type":"message_stop"}\n\n'),
        _inference("/v1/embeddings", "embeddings", "embed", None),
        Route("health", Kind.HEALTH, _GET, frozenset(), b"/health"),
        Route("metrics", Kind.METRICS, _GET, frozenset({ADMIN, READ, METRICS}), b"/metrics"),
    )
}

_STORED_RESPONSES = Route("stored responses", Kind.CONTROL, frozenset({b"GET", b"POST", b"DELETE"}), _INF)
_CONTROL: tuple[tuple[bytes, Route], ...] = (
    (
        b"/v1/files",
        Route("files", Kind.CONTROL, frozenset({b"GET", b"POST", b"DELETE"}), _TUNE, upload=True),
    ),
    (
        b"/v1/uploads",
        Route("uploads", Kind.CONTROL, frozenset({b"GET", b"POST", b"DELETE"}), _TUNE, upload=True),
    ),
    (b"/v1/fine_tuning", Route("fine_tuning", Kind.CONTROL, frozenset({b"GET", b"POST", b"DELETE"}), _TUNE)),
    (b"/v1/batches", Route("batches", Kind.CONTROL, frozenset({b"GET", b"POST"}), _INF)),
    (b"/v1/responses", _STORED_RESPONSES),
    (b"/v1/models", Route("models", Kind.CONTROL, _GET, _READ_MODELS)),
    (
        b"/admin/v1",
        Route(
            "admin",
            Kind.CONTROL,
            frozenset({b"GET", b"POST", b"PUT", b"PATCH", b"DELETE"}),
            frozenset({ADMIN}),
        ),
    ),
)
_MODELS_DELETE = Route("models", Kind.CONTROL, frozenset({b"DELETE"}), _TUNE)
_MODELS_SHARE = Route("models", Kind.CONTROL, frozenset({b"POST"}), _TUNE)
_ADMIN_READ = Route("admin", Kind.CONTROL, _GET, frozenset({ADMIN, READ}))

# No dot segments, no empty segments, no backslash, neither plain nor percent-encoded: the path that is
# checked here must be the path that the controller routes.
_UNSAFE_PATH = re.compile(
    rb"(?:/|%2f)(?:\.|%2e){1,2}(?:/|%2f|$)|//|\\|%5c|%0[0-9a-f]|%1[0-9a-f]|%7f|[^\x21-\x7e]", re.IGNORECASE
)


def resolve(method: bytes, path: bytes) -> Route:
    """The route of `method` on `path` (raw bytes, without the query).

    Raises ApiError 404 for a URL that is not on the list and 405 for a method that its URL does not take.
    """
    route = _EXACT.get(path)
    if route is None:
        route = _control(method, path)
    if method not in route.methods:
        allowed = b", ".join(sorted(route.methods)).decode()
        raise errors.method_not_allowed(_shown(method), _shown(path), allowed)
    return route


def _control(method: bytes, path: bytes) -> Route:
    for prefix, route in _CONTROL:
        if path.startswith(prefix) and (len(path) == len(prefix) or path[len(prefix)] == 0x2F):
            if _UNSAFE_PATH.search(path):
                break
            if route is _STORED_RESPONSES and method == b"POST" and not path.endswith(b"/cancel"):
                break
            if route.name == "models" and method == b"DELETE" and len(path) > len(prefix) + 1:
                return _MODELS_DELETE
            if route.name == "models" and method == b"POST" and path.endswith(b"/share"):
                return _MODELS_SHARE
            if route.name == "admin" and method == b"GET":
                return _ADMIN_READ
            return route
    raise errors.unknown_url(_shown(method), _shown(path))


def _shown(raw: bytes) -> str:
    return raw[:200].decode("ascii", "replace")
