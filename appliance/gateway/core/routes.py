"""The URLs that exist, the scopes that may call them, and where they go. Pure; an allowlist, so engines stay private.

The controller's own routes are below a few prefixes; it declares them itself, with the scopes of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from appliance.gateway.core import errors

INFERENCE, FINE_TUNING, ADMIN, READ, METRICS = "inference", "fine_tuning", "admin", "read", "metrics"
RESPONSES, INPUT_TOKENS, COUNT_TOKENS = "responses", "responses.input_tokens", "messages.count_tokens"
Kind = Literal["inference", "control", "health", "metrics", "page", "login", "unknown"]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allowlist. scopes: any one (or admin) suffices; no key is needed where there are none; the
    controller's own routes may ask for others. task: required task of the model. prompt: the field with the prompt.
    converses: it needs the model's chat template. body: the field of `Limits` that bounds the bodies of its requests,
    empty where they have none."""

    name: str
    kind: Kind
    methods: frozenset[bytes]
    scopes: frozenset[str]
    urls: re.Pattern[bytes]
    task: str | None = None
    engine_path: bytes = b""
    prompt: str = ""
    converses: bool = False
    body: str = ""


_INF = frozenset({INFERENCE})
_ANY = frozenset({ADMIN, READ, METRICS, INFERENCE, FINE_TUNING})
_NOBODY = frozenset[str]()


def _route(kind: Kind, methods: str, url: str, scopes: frozenset[str], name: str, **more: Any) -> Route:
    """url: `/a`: this URL; `/a/*`: those below it; `/a/**`: it and those below it; `/a/*/b`: those below it that end
    so. more: fields of `Route`."""
    pattern = url.replace("/**", "(?:/.+)?").replace("/*", "/.+").encode()
    return Route(name, kind, frozenset(methods.encode().split()), scopes, re.compile(pattern, re.DOTALL), **more)


def _inference(url: str, name: str, prompt: str = "messages", task: str = "generate", engine_path: str = "") -> Route:
    path, converses = (engine_path or url).encode(), task == "generate" and prompt != "prompt"
    more: dict[str, Any] = {"converses": converses, "task": task, "engine_path": path, "prompt": prompt}
    return _route("inference", "POST", url, _INF, name, body="inference_body_bytes", **more)


def _control(url: str, name: str, body: str = "control_body_bytes") -> Route:
    return _route("control", "GET POST PUT PATCH DELETE", url, _ANY, name, body=body)


# The route of a request until its own is known.
UNKNOWN = _route("unknown", "", "", _NOBODY, "unknown")
# Browsers are sent to the page from here; for programs it is an unknown URL.
FRONT_DOOR = b"/"
ROTATION = _control("/admin/v1/keys/*/rotate", "admin")
SESSIONS = _control("/admin/v1/sessions/**", "admin")

ROUTES: tuple[Route, ...] = (
    _inference("/v1/chat/completions", "chat.completions"),
    _route("control", "GET", "/v1/chat/completions", _INF, "control"),
    _inference("/v1/completions", "completions", "prompt"),
    _inference("/v1/responses", RESPONSES, "input"),
    _inference("/v1/responses/input_tokens", INPUT_TOKENS, "input", engine_path="/v1/responses/render"),
    _inference("/v1/messages", "messages"),
    _inference("/v1/messages/count_tokens", COUNT_TOKENS),
    _inference("/v1/embeddings", "embeddings", "input", "embed"),
    _route("health", "GET", "/health", _NOBODY, "health"),
    _route("metrics", "GET", "/metrics", frozenset({ADMIN, READ, METRICS}), "metrics"),
    # The page's files need no key; its requests do.
    _route("page", "GET", "/ui/**", _NOBODY, "page"),
    _route("page", "GET", "/", _NOBODY, "page"),
    # The page's way to a login provider and back, before anybody has a key or a login.
    _route("login", "GET", "/admin/v1/oidc", _NOBODY, "login"),
    _route("login", "POST", "/admin/v1/oidc/(?:begin|finish)", _NOBODY, "login", body="login_body_bytes"),
)
# Of the URLs that none above has, the first row: the controller decides on the rest of the URL, method and scopes.
CONTROL: tuple[Route, ...] = (
    _control("/v1/files/**", "files", "upload_body_bytes"),
    _control("/v1/uploads/**", "uploads", "upload_body_bytes"),
    SESSIONS,
    ROTATION,
    _control("/v1/*", "control"),
    _control("/admin/v1/*", "admin"),
)

# No dot segments, no empty segments, no backslash, neither plain nor percent-encoded, and no fragment, which the
# controller's parser cuts off: the path that is checked here must be the path that the controller routes.
_SLASHES = re.compile(rb"//+")
_UNSAFE_PATH = re.compile(
    rb"(?:/|%2f)(?:\.|%2e){1,2}(?:/|%2f|$)|//|\\|%5c|%0[0-9a-f]|%1[0-9a-f]|%7f|#|[^\x21-\x7e]", re.IGNORECASE
)


def is_anthropic(path: bytes) -> bool:
    """Whether a URL is one of Anthropic's API, whose answers have its shapes and headers."""
    return path.startswith(b"/v1/messages")


def plain_target(target: bytes) -> bytes:
    """A request's target without the empty segments and the last slash of its path, which base URLs with one slash too
    many bring. This result is checked, and routed by the controller."""
    path, mark, query = target.partition(b"?")
    path = _SLASHES.sub(b"/", path) if b"//" in path else path
    return (path.removesuffix(b"/") or b"/") + mark + query


@lru_cache(256)
def resolve(method: bytes, path: bytes) -> Route:
    """The route of `method` on `path` (raw bytes, without the query).

    Raises HttpError 404 for a URL that is not on the list and 405 for a method that its URL does not take."""
    rows = list[Route]()
    for table in () if _UNSAFE_PATH.search(path) else (ROUTES, CONTROL):
        rows = rows or [row for row in table if row.urls.fullmatch(path)]
    if (route := next((route for route in rows if method in route.methods), None)) is not None:
        return route
    shown, url = method[:200].decode("ascii", "replace"), path[:200].decode("ascii", "replace")
    if not rows:
        raise errors.unknown_url(shown, url)
    taken = set[bytes]().union(*(route.methods for route in rows))
    allowed = b", ".join(sorted(taken | ({b"HEAD"} if b"GET" in taken else set()))).decode()
    message = f"Not allowed to {shown} on {url}. Allowed: {allowed}."
    raise errors.HttpError(405, message, code="method_not_supported", allow=allowed)
