"""The allowlist of URLs, with the scopes that may call each and its destination. Pure; hides engines from clients.

Only the prefixes of the controller's routes are listed here; the controller declares the routes and their scopes."""

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
    """One row of the allowlist. scopes: the key needs one of these or admin; empty: no key is needed. The controller
    may require other scopes. task: the task that the model must have. prompt: the body field with the prompt.
    converses: the model needs a chat template. body: the field of `Limits` that bounds the request body, empty if there
    is no body."""

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
    """Build a row. url: `/a` matches itself, `/a/*` all URLs below `/a`, `/a/**` both, and `/a/*/b` URLs below `/a`
    that end in `/b`. more: further fields of `Route`."""
    pattern = url.replace("/**", "(?:/.+)?").replace("/*", "/.+").encode()
    return Route(name, kind, frozenset(methods.encode().split()), scopes, re.compile(pattern, re.DOTALL), **more)


def _inference(url: str, name: str, prompt: str = "messages", task: str = "generate", engine_path: str = "") -> Route:
    path, converses = (engine_path or url).encode(), task == "generate" and prompt != "prompt"
    more: dict[str, Any] = {"converses": converses, "task": task, "engine_path": path, "prompt": prompt}
    return _route("inference", "POST", url, _INF, name, body="inference_body_bytes", **more)


def _control(url: str, name: str, body: str = "control_body_bytes") -> Route:
    return _route("control", "GET POST PUT PATCH DELETE", url, _ANY, name, body=body)


# The route of a request until `resolve` has found the actual route.
UNKNOWN = _route("unknown", "", "", _NOBODY, "unknown")
# This path redirects browsers to the page; for programs it is an unknown URL.
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
    # The page's files need no key; the page's requests do.
    _route("page", "GET", "/ui/**", _NOBODY, "page"),
    _route("page", "GET", "/", _NOBODY, "page"),
    # Redirects from the page to a login provider and back need neither a key nor a login.
    _route("login", "GET", "/admin/v1/oidc", _NOBODY, "login"),
    _route("login", "POST", "/admin/v1/oidc/(?:begin|finish)", _NOBODY, "login", body="login_body_bytes"),
)
# Rows that apply if no row above matches, first match first; the controller checks the full URL, method and scopes.
CONTROL: tuple[Route, ...] = (
    _control("/v1/files/**", "files", "upload_body_bytes"),
    _control("/v1/uploads/**", "uploads", "upload_body_bytes"),
    SESSIONS,
    ROTATION,
    _control("/v1/*", "control"),
    _control("/admin/v1/*", "admin"),
)

# The controller must route exactly the path that is checked here. So refuse dot segments, empty segments and
# backslashes, plain or percent-encoded, and fragments, which the controller's parser cuts off.
_SLASHES = re.compile(rb"//+")
_UNSAFE_PATH = re.compile(
    rb"(?:/|%2f)(?:\.|%2e){1,2}(?:/|%2f|$)|//|\\|%5c|%0[0-9a-f]|%1[0-9a-f]|%7f|#|[^\x21-\x7e]", re.IGNORECASE
)


def is_anthropic(path: bytes) -> bool:
    """Whether a URL belongs to Anthropic's API; whose responses have Anthropic's format and headers."""
    return path.startswith(b"/v1/messages")


def plain_target(target: bytes) -> bytes:
    """Remove empty segments and the trailing slash from a request's path; an extra slash in a client's base URL adds
    them. The gateway and the controller both route the shortened path."""
    path, mark, query = target.partition(b"?")
    path = _SLASHES.sub(b"/", path) if b"//" in path else path
    return (path.removesuffix(b"/") or b"/") + mark + query


@lru_cache(256)
def resolve(method: bytes, path: bytes) -> Route:
    """Return the route of `method` on `path` (raw bytes, without the query).

    Raises HttpError 404 for an unlisted URL and 405 for a method that the URL does not accept."""
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
