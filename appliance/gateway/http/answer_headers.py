"""Headers that a request's head asks for on whatever answers it: those that let a page of another origin read it, and
Anthropic's `request-id`. Pure.

Cross-origin requests after https://fetch.spec.whatwg.org/#http-cors-protocol. Credentials (cookies) are never allowed:
a key says who asks, and a page must have been given one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from appliance.gateway.access.request import Headers, Pairs, Request
from appliance.gateway.core.routes import is_anthropic

ANY_ORIGIN: Final = "*"
# What scripts may read of an answer beside its body.
_EXPOSED: Final = (
    b"x-request-id, request-id, retry-after, x-should-retry, openai-processing-ms, x-appliance-model-version, "
    b"x-appliance-ignored-tools, x-appliance-ignored-items, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_METHODS: Final = b"GET, HEAD, POST, PUT, PATCH, DELETE"
# Names of headers in a list; what a browser asks for is said back, since clients in pages send many of their own.
_NAMES: Final = re.compile(rb"[A-Za-z0-9-]{1,64}(?: ?, ?[A-Za-z0-9-]{1,64}){0,63}\Z")
_PREFLIGHT_AGE_S: Final = b"7200"


def answer_headers(request: Request, origins: Sequence[str]) -> Pairs:
    """origins: of pages that may read answers. The request's id is known."""
    found = list(_cross_origin(request.headers, origins)) if origins else []
    if is_anthropic(request.path):
        found.append((b"request-id", request.request_id))
    return found


def is_preflight(request: Request, origins: Sequence[str]) -> bool:
    """Whether a browser asks, before it sends a page's request, if it may. It has no key then."""
    return (
        request.method == b"OPTIONS"
        and b"access-control-request-method" in request.headers
        and bool(origins)
        and bool(_cross_origin(request.headers, origins))
    )


def preflight_headers(request: Request) -> Pairs:
    """Headers of the answer to a preflight, beside `answer_headers`. The request itself is checked when it comes."""
    asked = request.headers.get(b"access-control-request-headers", b"").strip()
    found = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _PREFLIGHT_AGE_S)]
    if _NAMES.match(asked):
        found.append((b"access-control-allow-headers", asked))
    return found


def _cross_origin(headers: Headers, origins: Sequence[str]) -> Pairs:
    origin = headers.get(b"origin")
    if origin is None:
        return ()
    if ANY_ORIGIN in origins:
        return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED))
    if origin.decode("latin-1") not in origins:
        return ()
    return (
        (b"access-control-allow-origin", origin),
        (b"vary", b"origin"),
        (b"access-control-expose-headers", _EXPOSED),
    )
