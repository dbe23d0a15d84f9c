"""Answers every request: its head is admitted, its body read, and what its route says does the rest.

One coroutine per request, from the socket to the engine or the controller and back. What ends it early: an HttpError
becomes its answer, a client that left or a revoked key cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from appliance.gateway.access.auth import (
    LOGIN_BODY_BYTES,
    check_head,
    check_same_origin,
    check_scopes,
    key_digest,
    login_digest,
)
from appliance.gateway.access.request import Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import FRONT_DOOR, KEYLESS, Kind, is_anthropic, plain_target, resolve
from appliance.gateway.http import wire
from appliance.gateway.requests.request_check import Checked, check_length, check_object, parsed_body
from appliance.gateway.routing.table import THE_BOX, Caller
from appliance.gateway.server.controller import Controller
from appliance.gateway.server.exchange import ClientGone, Exchange
from appliance.gateway.server.inference import Inference
from appliance.gateway.server.reports import metrics_text
from appliance.gateway.server.state import State
from appliance.ui.site import TO_THE_PAGE, site
from appliance.ui.site import answer as answer_file
from runtime.moments import minute

log = logging.getLogger("appliance.gateway")

_JSON: Final = b"application/json"


class App:
    """The ASGI application."""

    def __init__(self, state: State, controller: Controller) -> None:
        self._state = state
        self._controller = controller

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        state = self._state
        exchange = Exchange(state, scope, receive, send)
        request = exchange.request
        state.exchanges.add(exchange)
        try:
            error = await self._outcome(exchange)
            if error is not None:
                await exchange.fail(error)
        except (ClientGone, asyncio.CancelledError):
            pass
        finally:
            state.exchanges.discard(exchange)
            if not exchange.finished:
                request.status = request.status or 499
                state.metrics.events["client_disconnected"] += 1
            state.finished(request, time.monotonic())

    async def _outcome(self, exchange: Exchange) -> HttpError | None:
        """Answer, or say why not."""
        try:
            await self._answer(exchange)
        except asyncio.CancelledError:
            if exchange.ended is None:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return exchange.ended
        except HttpError as error:
            return error
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the client is told
            log.error("a request was not answered", exc_info=error, extra=exchange.request.ids)
            return HttpError(500, "The gateway failed.", code="internal_error")
        return None

    async def _answer(self, exchange: Exchange) -> None:
        state, request = self._state, exchange.request
        request.received_s = time.monotonic()
        request.request_id = wire.accepted_request_id(request.headers) or state.new_request_id()
        request.set_target(plain_target(request.target))
        if is_anthropic(request.path):
            request.more_headers = [(b"request-id", request.request_id)]
        if request.method == b"HEAD":
            request.method = b"GET"
            request.head_only = True
        request.route = route = resolve(request.method, request.path)
        self._admit(exchange)
        if b"traceparent" in request.headers:
            request.trace = wire.accepted_trace(request.headers)
        if route.kind is Kind.INFERENCE:
            await self._infer(exchange)
        elif route.kind is Kind.CONTROL:
            await self._controller.relay(exchange)
        elif route.kind is Kind.LOGIN:
            await self._controller.relay(exchange, await exchange.body(LOGIN_BODY_BYTES))
        elif route.kind is Kind.METRICS:
            theirs = await self._controller.metrics(request)
            own = await metrics_text(state, controller_up=bool(theirs))
            await exchange.whole(200, CONTENT_TYPE_PLAIN_0_0_4.encode(), own + theirs)
        elif route.kind is Kind.PAGE:
            await self._page(exchange)
        else:
            await self._health(exchange)

    # -- who asks, and whether they may

    def _admit(self, exchange: Exchange) -> None:
        """Checks everything that a request's head determines. Raises HttpError."""
        state, request, route = self._state, exchange.request, exchange.request.route
        if route.kind not in KEYLESS:
            private = exchange.connection.private
            digest = "" if private else key_digest(request.headers)
            login = "" if private or digest else login_digest(request)
            if state.generation < 0:
                raise errors.unavailable("The gateway has no routing table yet. Please retry.", "starting", 2)
            if private:
                request.caller = caller = self._of_id(request.headers.get(wire.KEY_ID, b"").decode("latin-1"))
            else:
                request.caller = caller = self._of_key(digest) if digest else self._of_login(request, login)
            request.use = state.spending.use_of(caller, batch=request.headers.get(wire.CLASS) == b"batch")
            check_scopes(route, caller)
        elif route.kind is Kind.PAGE:
            html = b"text/html" in request.headers.get(b"accept", b"").lower()
            if request.path not in site() and not (request.path == FRONT_DOOR and html):
                raise errors.unknown_url(request.method.decode(), request.path.decode("ascii", "replace"))
        elif route.kind is Kind.LOGIN:
            check_same_origin(request)
        check_head(request, state.limits)

    def _of_key(self, digest: str) -> Caller:
        caller = self._state.keys.get(digest)
        if caller is not None and not caller.has_expired(time.time()):
            return caller
        self._state.metrics.events["bad_key"] += 1
        if caller is not None and caller.expires_s is not None:
            whom = "Ask whoever runs this box for another one."
            raise errors.invalid_key(f"This API key expired at {minute(caller.expires_s)}. {whom}")
        raise errors.invalid_key()

    def _of_id(self, key_id: str) -> Caller:
        caller = self._state.spending.callers.get(key_id) if key_id else THE_BOX
        if caller is None or caller.has_expired(time.time()):
            raise errors.invalid_key()
        return caller

    def _of_login(self, request: Request, digest: str) -> Caller:
        found = self._state.sessions.get(digest)
        if found is None or found[0].until_s <= time.time() or found[1].has_expired(time.time()):
            raise errors.session_ended()
        login, caller = found
        request.session = login.id
        return caller

    # -- inference

    async def _infer(self, exchange: Exchange) -> None:
        inference = await self._inference(exchange)  # apart, so that what only checking needs is gone while it waits
        if inference is not None:
            await inference.answer()

    async def _inference(self, exchange: Exchange) -> Inference | None:
        """Check a request, in order of cost: the key's limits, the body's content, the model, the work that is asked
        for. None: the controller has answered it."""
        state, request, route = self._state, exchange.request, exchange.request.route
        body = await exchange.body(state.limits.inference_body_bytes)
        request.received_s = request.complete_s
        state.spending.admit(request)
        data = parsed_body(body)
        state.callable_model(data["model"], request.caller)
        request.refused_model = data["model"].partition("@")[0]
        checked = check_object(route, data, len(body), state.limits)
        self._check_model(request, checked)
        transcript = checked.transcript
        if transcript is not None:
            transcript.stores = transcript.stores and state.config.stores_responses
            if transcript.stores and not self._controller.copies.has_room():
                transcript.stores = False
                state.metrics.events["responses_not_stored"] += 1
            state.take_body(request, len(transcript.input))  # which is in memory twice until the answer arrives
            if transcript.background:
                state.spending.opened(request, checked, state.limits)
                await self._controller.relay(exchange, body)
                return None
            if transcript.previous_id:
                body, checked = await self._controller.with_previous(request, body, checked)
                self._check_model(request, checked)
        state.spending.opened(request, checked, state.limits)
        request.model, request.row = checked.model.partition("@")[0], checked.model
        if state.tracing is not None:
            state.tracing.begin(request)
        return Inference(state, self._controller.copies, exchange, checked, checked.rewritten or body)

    def _check_model(self, request: Request, checked: Checked) -> None:
        """Raises HttpError unless the model does what is asked."""
        route, caller = request.route, request.caller
        if checked.ignored:
            request.ignored = checked.ignored
            told = "; ".join(value.decode() for _, value in checked.ignored)
            log.info("left out of the request, as no engine has it: %s", told, extra=request.ids)
        model = self._state.callable_model(checked.model, caller)
        if model.task != route.task:
            message = f"The model `{checked.model}` does not support {route.name}."
            raise HttpError(400, message, param="model", code="model_not_supported")
        if model.max_model_len is not None:
            check_length(checked, model.max_model_len)
        if route.converses and not model.chats:
            message = (
                f"The model `{checked.model}` has no chat template, so it knows no conversations: ask it with "
                "/v1/completions, or give it one with `appliance model deploy MODEL --chat-template FILE`."
            )
            raise HttpError(400, message, param="model", code="model_not_supported")  # before an engine is started

    # -- what the gateway knows itself

    async def _page(self, exchange: Exchange) -> None:
        headers, path = exchange.request.headers, exchange.request.path
        page = TO_THE_PAGE
        if path in site():
            tag, coding = headers.get(b"if-none-match"), headers.get(b"accept-encoding")
            page = answer_file(site()[path], if_none_match=tag, accept_encoding=coding)
        if page.status == 304:
            await exchange.begin(304, page.headers)
            await exchange.finish()
        else:
            await exchange.whole(page.status, page.content_type, page.body, page.headers)

    async def _health(self, exchange: Exchange) -> None:
        state = self._state
        ready = state.generation >= 0 and not state.stopping
        away = ["controller"] if state.controller_away else []
        degraded = sorted({*state.background.names(), *state.box_troubles, *away})
        told = {"status": "ok" if ready else "starting", "boot": state.config.boot, "degraded": degraded}
        await exchange.whole(200 if ready else 503, _JSON, orjson.dumps(told))
