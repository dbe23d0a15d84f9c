"""Answers every request: authenticates it and relays it to an engine or the controller, in one coroutine each.

A login of the page is a token of two halves. The first is a cookie that scripts cannot read; browsers send a cookie to
every port of a host, even with requests of other pages on that host. The page stores the second half and sends it in a
header that forms, images and links cannot set. A request needs both, so only the page itself can use a login."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, Final

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import ADMIN, FRONT_DOOR, resolve
from appliance.gateway.core.table import THE_BOX, Caller
from appliance.gateway.requests.request_check import check_object, parsed_body
from appliance.gateway.server.controller import Controller
from appliance.gateway.server.exchange import Exchange, Headers
from appliance.gateway.server.inference import Inference
from appliance.gateway.server.state import State, gauges
from appliance.ui.site import TO_THE_PAGE, site
from runtime.logs import minute
from weights.format.names import policy_of

log = logging.getLogger("appliance.gateway")

# A client's header; `batch` marks work that yields to interactive requests.
CLASS: Final = b"x-appliance-class"
# On the private socket: the id of the key for which the box sends the request, empty for none.
KEY_ID: Final = b"x-appliance-key-id"
PAGE_HEADER: Final = b"x-appliance-page"
_JSON: Final = b"application/json"
_TRACE: Final = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class App:
    """The ASGI-like application that uvicorn's connections call for each request."""

    def __init__(self, state: State, controller: Controller) -> None:
        self._state, self._controller = state, controller

    async def __call__(self, exchange: Exchange) -> None:
        state = self._state
        state.exchanges.add(exchange)
        try:
            try:
                exchange.received_s = time.monotonic()
                own_id = exchange.headers.get(b"x-request-id", b"")
                exchange.request_id = own_id if _REQUEST_ID.match(own_id) else state.new_request_id()
                if state.config.cors_origins:
                    exchange.extra += cors_headers(exchange, state.config.cors_origins)
                preflight = exchange.method == b"OPTIONS" and b"access-control-request-method" in exchange.headers
                if preflight and len(exchange.extra) > 1:
                    await exchange.whole(200, b"text/plain", b"OK")
                else:
                    self._admit(exchange)
                    await self._serve(exchange)
            except asyncio.CancelledError:
                if exchange.ended is None:
                    raise
                exchange.task.uncancel()
                await exchange.fail(exchange.ended)
            except HttpError as error:
                await exchange.fail(error)
            except Exception as failure:  # noqa: BLE001 - logged, and the client gets a 500
                log.error("a request failed with an internal error", exc_info=failure, extra=exchange.ids)
                await exchange.fail(HttpError(500, "The gateway failed.", code="internal_error"))
        except asyncio.CancelledError:
            exchange.connection.transport.abort()  # the client has gone, or does not read the error
        finally:
            state.exchanges.discard(exchange)
            if not exchange.response_complete:
                exchange.status = exchange.status or 499
                state.metrics.events["client_disconnected"] += 1
            state.finished(exchange, time.monotonic())
            exchange.checked = None  # frees memory: an idle connection keeps its last exchange

    # -- keys, logins and scopes

    def _admit(self, exchange: Exchange) -> None:
        """Check route, key, scopes and size of a request by its head alone. Raises HttpError."""
        state, headers = self._state, exchange.headers
        if exchange.method == b"HEAD":
            exchange.method, exchange.head_only = b"GET", True
        exchange.route = route = resolve(exchange.method, exchange.path)
        if route.scopes:
            exchange.caller = caller = self._caller(exchange)
            exchange.use = state.spending.use_of(caller, batch=headers.get(CLASS) == b"batch")
            if ADMIN not in caller.scopes and not (route.scopes & caller.scopes):
                message = "You have insufficient permissions for this operation. The API key needs the scope: "
                raise HttpError(403, f"{message}{' or '.join(sorted(route.scopes))}.", code="insufficient_permissions")
        elif route.kind == "page":
            html = b"text/html" in headers.get(b"accept", b"").lower()
            if exchange.path not in site() and not (exchange.path == FRONT_DOOR and html):
                raise errors.unknown_url(exchange.method.decode(), exchange.path.decode("ascii", "replace"))
        elif route.kind == "login":
            check_same_origin(exchange)
        check_head(exchange, state.limits)
        if (trace := headers.get(b"traceparent")) is not None and _TRACE.match(trace):
            exchange.trace = trace

    def _caller(self, exchange: Exchange) -> Caller:
        """Identify the caller: a key id on the private socket, a key, or a login of the page. Raises HttpError 401."""
        state, headers, now_s = self._state, exchange.headers, time.time()
        if state.generation < 0:
            raise errors.unavailable("The gateway has no routing table yet. Please retry.", "starting", 2)
        caller: Caller | None
        if exchange.connection.private:
            key_id = headers.get(KEY_ID, b"").decode("latin-1")
            caller = state.spending.callers.get(key_id) if key_id else THE_BOX
        elif digest := key_digest(headers):
            caller = state.keys.get(digest)
        else:
            login, caller = state.sessions.get(login_digest(exchange), (None, None))
            if login is None or caller is None or login.until_s <= now_s or caller.has_expired(now_s):
                raise errors.session_ended()
            exchange.session = login.id
        if caller is not None and not caller.has_expired(now_s):
            return caller
        state.metrics.events["bad_key"] += 1
        message = "Incorrect API key provided, or the key was revoked."
        if caller is not None and caller.expires_s is not None:
            message = f"This API key expired at {minute(caller.expires_s)}. Ask the administrator for a new key."
        raise HttpError(401, message, code="invalid_api_key")

    # -- routes

    async def _serve(self, exchange: Exchange) -> None:
        state, kind = self._state, exchange.route.kind
        if kind == "inference":
            inference = await self._inference(exchange)  # a separate call, so that its variables are freed
            if inference is not None:
                await inference.answer()
        elif kind in ("control", "login"):  # read a login first: no slow client without a key may hold a connection
            login = b"".join([piece async for piece in exchange.pieces()]) if kind == "login" else None
            await self._controller.relay(exchange, login)
        elif kind == "metrics":
            controllers = await self._controller.metrics(exchange)
            current = [*state.metrics.registry.collect(), *gauges(state, bool(controllers))]
            collected: Any = SimpleNamespace(collect=lambda: current)
            text = await asyncio.to_thread(generate_latest, collected)  # in a thread, because it takes up to 0.3 s
            await exchange.whole(200, CONTENT_TYPE_PLAIN_0_0_4.encode(), text + controllers)
        elif kind == "page":
            file = site().get(exchange.path, TO_THE_PAGE)
            await exchange.whole(303 if file is TO_THE_PAGE else 200, file.content_type, file.body, file.headers)
        else:
            ready = state.generation >= 0 and not state.stopping
            failing = {*state.background.names(), *state.box_troubles, *["controller"] * state.controller_away}
            body = {"status": "ok" if ready else "starting", "degraded": sorted(failing)}
            await exchange.whole(200 if ready else 503, _JSON, orjson.dumps(body))

    async def _inference(self, exchange: Exchange) -> Inference | None:
        """Check an inference request, cheapest checks first: the key's limits, the JSON, the model, the fields, the
        requested work. Returns None if the controller has answered it."""
        state, route = self._state, exchange.route
        pieces: list[bytes] = []
        while piece := await exchange.read():
            state.take_body(exchange, len(piece))  # raises HttpError if bodies need too much memory
            pieces.append(piece)
        body, exchange.received_s = b"".join(pieces), time.monotonic()
        caller, private = exchange.caller, exchange.connection.private
        state.spending.admit(caller, exchange.use)
        data = parsed_body(body, state.limits.json_depth)
        name, in_training = data["model"], policy_of(data["model"]) is not None
        if private and in_training:
            name = name.partition("@")[0]  # the table has one row for all its versions; the engine selects the version
        model = state.callable_model(name, caller, private)
        exchange.model = (model.trained_from if in_training else name).partition("@")[0]
        unfit = "" if model.task == route.task else f"does not support {route.name}"
        if route.converses and not model.chats:
            unfit = unfit or "has no chat template. Call /v1/completions, or deploy it with --chat-template"
        if unfit:  # refuse the request before it can start an engine
            raise HttpError(400, f"The model `{name}` {unfit}.", param="model", code="model_not_supported")
        checked = check_object(route, data, len(body), state.limits)
        transcript = checked.transcript
        background = transcript is not None and transcript.background
        if transcript is not None:
            transcript.stores = transcript.stores and state.config.stores_responses
            if transcript.stores and self._controller.copies_bytes >= state.limits.response_copies_bytes:
                transcript.stores = False
                state.metrics.events["responses_not_stored"] += 1
            state.take_body(exchange, len(transcript.input))  # memory has a second copy until the answer
            if transcript.previous_id and not background:
                checked = await self._controller.with_previous(exchange, data, checked)
        exchange.extra += checked.ignored
        if background:  # the controller stores the request and later sends it as its own
            await self._controller.relay(exchange, body)
            return None
        state.spending.opened(caller, exchange.use, checked.tokens, state.limits.owner_requests)
        checked.model = exchange.routed_model = name
        exchange.checked = checked
        if state.tracing is not None:
            state.tracing.begin(exchange)
        return Inference(state, self._controller, exchange, checked)


def key_digest(headers: Headers) -> str:
    """Return the SHA-256 of the request's key, as in the table; empty for a request with only the page's header. Raises
    HttpError 401 if it has neither."""
    value, key = headers.get(b"authorization"), headers.get(b"x-api-key", b"")
    if value is not None:
        scheme, _, rest = value.partition(b" ")
        key = rest.strip() if scheme.lower() == b"bearer" else b""
    if key:
        return hashlib.sha256(key).hexdigest()
    if value is None and PAGE_HEADER in headers:
        return ""
    message = "You didn't provide an API key. Send it in an Authorization header: Authorization: Bearer YOUR_KEY."
    raise HttpError(401, message, code="missing_api_key")


def login_digest(exchange: Exchange) -> str:
    """Return the SHA-256 of the login's token, as in the table. Raises HttpError 401 without the cookie, 403 for a
    request of another page."""
    check_same_origin(exchange)
    name, _, half = exchange.headers[PAGE_HEADER].partition(b".")
    pairs = (pair.partition(b"=") for pair in exchange.headers.get(b"cookie", b"").split(b";"))
    cookie = next((value.strip() for field, _, value in pairs if field.strip() == name), b"")
    if not name or not half or not cookie:
        raise errors.session_ended()
    return hashlib.sha256(b"%b.%b" % (cookie, half)).hexdigest()


def check_same_origin(exchange: Exchange) -> None:
    """Refuse a request of another page. Raises HttpError 403.

    Browsers send Sec-Fetch-Site (https://www.w3.org/TR/fetch-metadata/), over plain HTTP only to localhost. Otherwise
    the Origin header decides, which browsers omit for reads."""
    headers = exchange.headers
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        by_the_page = site == b"same-origin"
    elif origin is not None:
        by_the_page = origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
    else:
        by_the_page = exchange.method == b"GET"
    if not by_the_page:
        raise HttpError(403, "A login of the page is only valid for the page itself.", code="cross_site_request")


def cors_headers(exchange: Exchange, origins: Collection[str]) -> list[tuple[bytes, bytes]]:
    """Return headers that let pages of these origins call every route and read answers from a browser. Credentials
    (cookies) stay excluded, so a page needs a key."""
    origin, every = exchange.headers.get(b"origin", b""), "*" in origins
    if not origin or not (every or origin.decode("latin-1") in origins):
        return [(b"vary", b"Origin")]
    return [
        (b"access-control-allow-origin", b"*" if every else origin),
        (b"access-control-expose-headers", b"*"),
        (b"access-control-allow-methods", b"DELETE, GET, HEAD, PATCH, POST, PUT"),
        (b"access-control-allow-headers", exchange.headers.get(b"access-control-request-headers", b"*")),
        (b"access-control-max-age", b"7200"),
        (b"vary", b"Origin"),
    ]


def check_head(exchange: Exchange, limits: Limits) -> None:
    """Refuse a body by its headers alone. Raises HttpError 400, 413 or 415."""
    headers, length, limit = exchange.headers, exchange.content_length, getattr(limits, exchange.route.body, 0)
    if (length or exchange.chunked) and exchange.method not in (b"POST", b"PUT", b"PATCH"):
        # A server that does not read a body here would parse it as the next request.
        method = exchange.method.decode()
        text = f"A {method} request has no body here. Send it without one."
        raise HttpError(400, text, code="unexpected_body", close=exchange.chunked)
    if length is not None and length > limit:
        raise errors.body_too_large(limit)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        # The size of a compressed body does not bound the cost of reading it.
        raise HttpError(415, "Compressed request bodies are not accepted.", code="unsupported_content_encoding")
