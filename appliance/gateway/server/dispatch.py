"""Admits or refuses a request by its head, checks its body, and chooses its handler."""

from __future__ import annotations

import logging
import time

import orjson

from appliance.gateway.access.admission import check_head, check_scopes, key_digest
from appliance.gateway.access.page_login import check_asked_by_the_page, login_digest
from appliance.gateway.access.request import Request
from appliance.gateway.control.previous_response import PreviousResponse
from appliance.gateway.control.relay import Relay, WholeRelay
from appliance.gateway.control.scrape import Scrape
from appliance.gateway.core import errors
from appliance.gateway.core.routes import FRONT_DOOR, KEYLESS, Kind
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.handler import Handler
from appliance.gateway.inference.handler import InferenceHandler
from appliance.gateway.inference.response_copies import ResponseCopies
from appliance.gateway.payload.request_check import Checked, check_object, parsed_body
from appliance.gateway.routing.table import Caller
from appliance.gateway.state.state import State
from appliance.ui.site import TO_THE_PAGE, SiteAnswer, site
from appliance.ui.site import answer as answer_file

log = logging.getLogger("appliance.gateway")


class Dispatch:
    """One for all connections of a process."""

    def __init__(self, state: State, copies: ResponseCopies) -> None:
        self._state = state
        self._copies = copies

    def admit(self, request: Request, client: Client) -> None:
        """Check everything that a request's head determines. Raises HttpError."""
        state, route = self._state, request.route
        assert route is not None
        kind = route.kind
        if kind is Kind.INFERENCE or kind not in KEYLESS:
            digest = key_digest(request.headers)
            login = "" if digest else login_digest(request)
            if state.generation < 0:
                raise errors.unavailable("The gateway has no routing table yet. Please retry.", "starting", 2)
            caller = state.keys.get(digest) if digest else self._of_login(request, login)
            if caller is None:
                state.metrics.events["bad_key"] += 1
                raise errors.key_expired(since_s) if (since_s := state.expired.get(digest)) else errors.invalid_key()
            if caller.expires_s is not None and caller.expires_s <= time.time():
                state.metrics.events["bad_key"] += 1
                raise errors.key_expired(caller.expires_s)
            request.caller = caller
            request.use = state.spending.use_of(caller)
            check_scopes(route, caller)
        elif kind is Kind.PAGE:
            if request.path not in site() and not _is_browser_at_the_door(request):
                raise errors.unknown_url(request.method.decode(), request.path.decode("ascii", "replace"), "")
        elif kind is Kind.LOGIN:
            check_asked_by_the_page(request)
            state.spending.admit_login(client.network)
        check_head(request, state.limits)

    def _of_login(self, request: Request, digest: str) -> Caller:
        """Whose login of the page it is. Raises HttpError 401."""
        session = self._state.sessions.get(digest)
        if session is None or session.until_s <= time.time():
            raise errors.session_ended()
        request.session = session.id
        return session.caller

    def handler(self, client: Client, request: Request) -> Handler:
        """Return the handler of this request. Raises HttpError for an unacceptable body."""
        state, route = self._state, request.route
        assert route is not None
        headers = request.headers
        if b"traceparent" in headers:
            request.trace = wire.accepted_trace(headers)
        caller, use = request.caller, request.use
        if caller is None and route.kind is Kind.LOGIN:
            return WholeRelay(state, client, request)
        assert caller is not None and use is not None
        if route.kind is not Kind.INFERENCE:
            state.spending.admit_control(caller, use, state.limits)
            state.spending.opened_control(request, caller, use, state.limits)
            return Relay(state, client, request) if route.kind is Kind.CONTROL else Scrape(state, client, request)
        # In order of cost: the key's limits, then the body's content, the model, and the requested work.
        state.spending.admit(request, use, state.limits)
        chunks = request.chunks
        if len(chunks) != 1:
            request.chunks = chunks = [b"".join(chunks)]
        data = parsed_body(chunks[0], state.limits)
        name: str = data["model"]
        state.callable_model(name, caller)
        request.refused_model = name.partition("@")[0] if "@" in name else name
        return self._checked(client, request, check_object(route, data, len(chunks[0]), state.limits))

    def _checked(self, client: Client, request: Request, checked: Checked) -> Handler:
        """Return the handler of this inference request, whose body is `checked`. Raises HttpError."""
        state, route = self._state, request.route
        assert route is not None
        assert request.caller is not None
        if checked.ignored:
            request.ignored = checked.ignored
            told = "; ".join(value.decode() for _, value in checked.ignored)
            log.info("left out of the request, as no engine has it: %s", told, extra=request.ids)
        model = state.callable_model(checked.model, request.caller)
        if model.task != route.task:
            raise errors.wrong_task(checked.model, route.name)
        if route.converses and not model.chats:
            raise errors.no_chat_template(checked.model)  # before an engine is started for it
        transcript = checked.transcript
        if transcript is not None:
            transcript.stores = transcript.stores and state.config.stores_responses
            if not transcript.has_previous:
                state.take_body(request, len(transcript.input))  # which is in memory twice until the answer arrives
            if transcript.background:
                state.spending.spend(request, checked, state.limits)
                state.spending.opened(request, checked)
                return WholeRelay(state, client, request)
            if transcript.previous_id and not transcript.has_previous:
                # Count it against the controller: a hundred bytes can name a conversation of megabytes.
                assert request.use is not None
                state.spending.admit_control(request.caller, request.use, state.limits)
                return PreviousResponse(state, client, request, checked, self._checked)
        state.spending.spend(request, checked, state.limits)
        state.spending.opened(request, checked)
        if checked.rewritten:
            request.chunks = [checked.rewritten]
        # Counters and logs name the model; the replica gives the version.
        name = checked.model
        request.model = name.partition("@")[0] if "@" in name else name
        state.metrics.arrived(name, checked.prompt_tokens, request.received_s)
        if state.tracing is not None:
            state.tracing.begin(request)
        return InferenceHandler(state, self._copies, client, request, checked)

    def page(self, request: Request) -> SiteAnswer:
        """The answer with a file of the page, which `admit` found."""
        headers = request.headers
        if request.path not in site():
            return TO_THE_PAGE
        return answer_file(
            site()[request.path],
            if_none_match=headers.get(b"if-none-match"),
            accept_encoding=headers.get(b"accept-encoding"),
        )

    def health(self) -> tuple[int, bytes, bytes]:
        """The answer to /health: status, content type, body."""
        state = self._state
        ready = state.generation >= 0 and not state.stopping
        away = ["controller"] if state.controller_away else []
        degraded = sorted({*state.background.names(), *state.box_troubles, *away})
        told = {"status": "ok" if ready else "starting", "boot": state.config.boot, "degraded": degraded}
        return (200 if ready else 503), b"application/json", orjson.dumps(told)


def _is_browser_at_the_door(request: Request) -> bool:
    """Whether somebody typed the box's address into a browser; programs ask for no document."""
    return request.path == FRONT_DOOR.path and b"text/html" in request.headers.get(b"accept", b"").lower()
