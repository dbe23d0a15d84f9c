"""Serves one client connection: parses requests, refuses bad ones, passes good ones to a handler.

States of a connection: idle (no request) → head → [body] → answering → idle …, or → lingering → closed.
Invariants: at most one request is being answered; a connection whose bytes could not be parsed never carries
another request; the gateway's count of buffered body bytes includes exactly the bodies of unfinished requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Final

from appliance.gateway.access.admission import body_limit, check_scopes
from appliance.gateway.access.request import Pairs, Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import PREFLIGHT, ROTATION, SESSIONS, Kind, plain_target, resolve
from appliance.gateway.http import wire
from appliance.gateway.http.answer_headers import answer_headers, is_preflight, preflight_headers
from appliance.gateway.http.error_shapes import error_response
from appliance.gateway.routing.table import Caller
from appliance.gateway.server.dispatch import Dispatch
from appliance.gateway.server.request_parser import Closing, Receiver, RequestParser
from appliance.gateway.state.state import State

# Largest body of a refused request that is read to keep the connection; a larger one closes it.
_DISCARD_BYTES: Final = 256 * 1024
_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 4 * 1024 * 1024
# A longer piece of a body is kept as it came: a copy costs more than the memory that a piece takes beside its bytes.
_SMALL_BYTES: Final = 4096
# Closed at once when all places are taken, so that not every new connection looks for the longest idle one.
_PLACES_MADE: Final = 64


class ClientConnection(Receiver):
    """See the module's docstring."""

    active_request: Request | None = None
    _deadline_s: float = 0.0
    _stalled_since_s: float = 0.0
    _stalled_s: float = 0.0
    _closing: bool = False
    _linger_bytes: int = 0
    _window_start_s: float = 0.0
    _window_bytes: int = 0
    _body_since_s: float = 0.0
    _paused_since_s: float = 0.0
    _idle_since_s: float = 0.0
    # A request waits until the client has read more of its earlier answers.
    _held: bool = False
    _owner: str | None = None

    def __init__(self, state: State, dispatch: Dispatch) -> None:
        super().__init__(state.outbox)
        self._state = state
        self._dispatch = dispatch
        self._parser: RequestParser | None = None
        self._waiting: deque[Request | HttpError] = deque()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._parser = RequestParser(self._state, self)
        state = self._state
        self._idle_since_s = monotonic()
        self._deadline_s = self._idle_since_s + state.limits.head_timeout_s
        most = state.limits.max_connections
        if len(state.connections) >= most:
            self._make_places()
        full = len(state.connections) >= most
        state.connections.add(self)
        if full:
            state.metrics.events["connection_refused"] += 1
            self._refuse(errors.unavailable("Too many open connections.", "too_many_connections", 2))

    def _make_places(self) -> None:
        """Close connections that do nothing: nobody may hold all places by opening them. Those go first that never had
        a key, then those of the owner who has most, so that a neighbour's stay, his idle ones before those whose
        request is still arriving; of equal ones the longest idle."""
        crowds: dict[str, int] = {}
        idle: list[tuple[bool, int, bool, float, int, ClientConnection]] = []
        for other in self._state.connections:
            if isinstance(other, ClientConnection) and other._owner is not None:
                crowds[other._owner] = crowds.get(other._owner, 0) + 1
        for place, other in enumerate(self._state.connections):
            if isinstance(other, ClientConnection) and other.active is None:
                owner = other._owner
                crowd = 0 if owner is None else crowds[owner]
                arriving = owner is not None and other.parsing is not None
                since_s = max(other._idle_since_s, other._body_since_s)
                idle.append((owner is not None, -crowd, arriving, since_s, place, other))
        idle.sort()
        for _, _, _, _, _, other in idle[: min(_PLACES_MADE, (len(self._state.connections) + 7) // 8)]:
            self._state.metrics.events["connection_gave_place"] += 1
            self._state.connections.discard(other)
            other.abort()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if self._closing or parser is None:
            self._linger_bytes += len(data)
            if self._linger_bytes > _LINGER_BYTES:
                self.abort()
            return
        try:
            parser.feed(data)
        except HttpError as error:
            self._refuse(error)

    def eof_received(self) -> bool:
        # Half-closed clients count as gone: otherwise an engine might compute for a client that no longer reads.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._stop_parsing()
        self._state.connections.discard(self)
        handler, request = self.active, self.active_request
        self.active = self.active_request = None
        if request is not None:
            # Also if creating a handler failed: otherwise its body would count for its owner for ever.
            if handler is not None:
                handler.client_lost()
            request.status = request.status or 499
            self._state.metrics.events["client_disconnected"] += 1
            self._state.finished(request, monotonic())
        for waiting in self._waiting:
            if isinstance(waiting, Request):
                self._state.release_body(waiting)
        self._waiting.clear()
        if self.parsing is not None and self.parsing is not request:
            self._state.release_body(self.parsing)
        self.parsing = None

    def pause_writing(self) -> None:
        self.write_paused = True
        self._stalled_since_s = monotonic()
        if self.active_request is not None:
            self.active_request.held_up = True
        if self.active is not None:
            self.active.client_paused(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        self._stalled_s += monotonic() - self._stalled_since_s
        if self.active is not None:
            self.active.client_paused(False)
        elif self._held and not self._closing:
            self._next(monotonic())

    # -- from the parser; an HttpError raised here ends the connection after it is answered

    def request_begins(self) -> None:
        if self._closing:
            raise Closing
        if self._state.stopping:
            raise errors.unavailable("The server is shutting down.", "shutting_down", 2)
        if self.active is None:
            self._deadline_s = monotonic() + self._state.limits.head_timeout_s

    def head_complete(self, request: Request) -> None:
        now = monotonic()
        request.received_s = now
        self._window_start_s = self._body_since_s = now
        self._window_bytes = 0
        origins = self._state.config.cors_origins
        try:
            request.request_id = wire.accepted_request_id(request.headers) or self._state.new_request_id()
            request.set_target(plain_target(request.target))
            request.more_headers = answer_headers(request, origins)
            if request.method == b"HEAD":
                request.method, request.head_only = b"GET", True
            preflight = is_preflight(request, origins)
            request.route = PREFLIGHT if preflight else resolve(request.method, request.path)
            self._dispatch.admit(request, self)
        except HttpError as error:
            request.refusal = error
        if request.caller is not None:
            self._owner = request.caller.owner
        if self.active is not None or self.write_paused:
            # Pipelining: answer in order, and read nothing more until its turn. No request's turn comes while the
            # client does not read: otherwise three thousand requests for a script of the page, 200 kB, made a worker
            # hold 149 MB of answers.
            self._held = self._held or self.active is None
            if len(self._waiting) >= self._state.limits.pipelined_requests:
                raise errors.protocol_error("Too many pipelined requests.")
            self.pause_reading()
        else:
            self._head_ready(request)

    def _head_ready(self, request: Request) -> None:
        """The head is parsed and it is its turn. Raises the request's HttpError if its body need not be read."""
        expects = request.headers.get(b"expect")
        if request.refusal is not None:
            if expects is not None or request.chunked or (request.content_length or 0) > _DISCARD_BYTES:
                raise request.refusal
            return
        if expects is not None:
            self.write(wire.CONTINUE)
        if not request.buffered:
            self.begin(request)

    def body_data(self, data: bytes) -> None:
        request = self.parsing
        if request is None:
            return  # answered and closing
        length = len(data)
        request.body_bytes += length
        self._window_bytes += length
        if request.refusal is not None:
            if request.body_bytes > _DISCARD_BYTES:
                raise request.refusal
            request.body_bytes = 0
            return
        limit = body_limit(request.route, self._state.limits)
        if request.body_bytes > limit:
            raise errors.body_too_large(limit)
        if request.buffered:
            self._state.take_body(request, length)
            _keep(request.chunks, data)
        elif request is self.active_request and self.active is not None:
            self.active.body(data)
        else:
            _keep(request.chunks, data)

    def request_complete(self, request: Request) -> None:
        self.parsing = None
        request.complete = True
        if request is self.active_request:
            if self.active is not None:
                self.active.body_end()
        elif self.active is not None or self.write_paused:
            self._held = self._held or self.active is None
            self._waiting.append(request)
        else:
            self.begin(request)

    # -- answering

    def begin(self, request: Request) -> None:
        self.active_request = request
        self._stalled_s = 0.0
        if request.refusal is not None:
            self.answer_error(request.refusal)
            return
        assert request.route is not None
        if request.route.kind is Kind.PREFLIGHT:
            self._answer_head(204, preflight_headers(request))
        elif request.route.kind is Kind.PAGE:
            page = self._dispatch.page(request)
            if page.status == 304:
                self._answer_head(304, page.headers)
                return
            request.more_headers = [*request.more_headers, *page.headers]
            self.answer(page.status, page.content_type, page.body)
        elif request.route.kind is not Kind.HEALTH:
            request.received_s = monotonic()
            try:
                self.active = self._dispatch.handler(self, request)
            except HttpError as error:
                self.answer_error(error)
                return
            self.active.start()
            if not request.buffered:
                self._pass_on_body(request)
        else:
            status, content_type, body = self._dispatch.health()
            self.answer(status, content_type, body)

    def answer(self, status: int, content_type: bytes, body: bytes) -> None:
        request = self.active_request
        assert request is not None
        request.status = status
        head = wire.response_head(
            status,
            request.request_id,
            content_type=content_type,
            length=len(body),
            close=not self.will_keep_alive,
            extra=request.answer_headers,
        )
        self.write(head if request.head_only else b"%b%b" % (head, body))
        self.finished(keep_alive=True)

    def _answer_head(self, status: int, headers: Pairs) -> None:
        request = self.active_request
        assert request is not None
        request.status = status
        extra = [*headers, *request.answer_headers]
        self.write(wire.response_head(status, request.request_id, close=not self.will_keep_alive, extra=extra))
        self.finished(keep_alive=True)

    def answer_error(self, error: HttpError) -> None:
        request = self.active_request
        assert request is not None
        close = error.close or not self.will_keep_alive
        data = error_response(error, request, request.request_id, close=close)
        if request.head_only:
            data = data[: data.index(b"\r\n\r\n") + 4]
        self.write(data)
        self.finished(keep_alive=not error.close)

    def abort_response(self) -> None:
        request = self.active_request
        assert request is not None
        self.active = self.active_request = None
        self._state.metrics.events["response_aborted"] += 1
        self._state.finished(request, monotonic())
        self.abort()

    @property
    def will_keep_alive(self) -> bool:
        request = self.active_request
        return request is not None and request.keep_alive and request.complete and not self._state.stopping

    def finished(self, *, keep_alive: bool, now_s: float = 0.0) -> None:
        request = self.active_request
        assert request is not None
        now_s = now_s or monotonic()
        reusable = keep_alive and self.will_keep_alive
        self.active = self.active_request = None
        self._state.finished(request, now_s)
        if not reusable:
            self._close(read_rest=not request.complete)
        else:
            self._next(now_s)

    def _next(self, now_s: float) -> None:
        """The request whose turn it is begins, if there is one, and if the client reads."""
        self._held = self.write_paused
        if self.write_paused:
            self._deadline_s = now_s + self._state.limits.keepalive_s
        elif self._waiting:
            waiting = self._waiting.popleft()
            if isinstance(waiting, HttpError):
                self._refuse(waiting)
            else:
                self.begin(waiting)
        else:
            self._next_idle(now_s)

    def _pass_on_body(self, request: Request) -> None:
        """Pass on the part of a streamed body that arrived before its turn (pipelining)."""
        chunks, request.chunks = request.chunks, []
        for data in chunks:
            if self.active is not None and self.active_request is request:
                self.active.body(data)
        if request.complete and self.active is not None and self.active_request is request:
            self.active.body_end()

    def _next_idle(self, now_s: float) -> None:
        self._idle_since_s = now_s
        self._deadline_s = now_s + self._state.limits.keepalive_s
        if self.parsing is not None:
            # Its head arrived during another request's answer; its turn is now.
            try:
                self._head_ready(self.parsing)
            except HttpError as error:
                self._refuse(error)
                return
        if self.read_paused:
            self.resume_reading()

    def _refuse(self, error: HttpError) -> None:
        """Answer an error and close; if another request is still being answered, after it."""
        error.close = True
        if self.active is not None or self._waiting:
            request = self.active_request
            if self.active is not None and self.parsing is request and request is not None:
                # The body of the request being answered is bad: its handler cannot go on.
                self.active.cancel(error)
            else:
                self._waiting.append(error)
                if self.parsing is not None:
                    self._state.release_body(self.parsing)
                    self.parsing = None
            self._stop_parsing()
            return
        request = self.parsing
        self._stop_parsing()
        request_id = request.request_id if request is not None else b""
        data = error_response(error, request, request_id or self._state.new_request_id(), close=True)
        if request is not None:
            self.parsing = None
            self._state.finished(request, monotonic())
        else:
            self._state.metrics.requests["unknown", error.status] += 1
        self.write(data)
        self._close(read_rest=True)

    def _stop_parsing(self) -> None:
        if self._parser is not None:
            self._parser.close()
            self._parser = None

    def _close(self, *, read_rest: bool) -> None:
        transport = self.transport
        self._closing = True
        if self.parsing is not None:
            self._state.release_body(self.parsing)
            self.parsing = None
        if transport is None:
            return
        if not read_rest or not transport.can_write_eof():
            self._deadline_s = monotonic() + self._state.limits.write_stall_s
            self.close()
            return
        # Closing with unread bytes sends a reset that can destroy the answer in flight: send EOF and read on briefly.
        self._deadline_s = monotonic() + _LINGER_S
        self.flush()
        transport.write_eof()
        self.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_since_s = monotonic()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            now = monotonic()
            self._window_start_s, self._window_bytes = now, 0
            # The delay meanwhile was not the client's.
            self._body_since_s += now - self._paused_since_s
        super().resume_reading()

    # -- time

    def tick(self, now_s: float) -> None:
        limits = self._state.limits
        if self.write_paused:
            stalled_s = now_s - self._stalled_since_s
            request = self.active_request
            sent = request.sent_bytes if request is not None else 0
            allowed_s = limits.answer_grace_s + sent / limits.answer_bytes_per_s
            if stalled_s > limits.write_stall_s or self._stalled_s + stalled_s > allowed_s:
                self._state.metrics.events["client_stalled"] += 1
                self.abort()
                return
        if self._closing:
            if now_s > self._deadline_s:
                self.abort()
            return
        parsing = self.parsing
        if parsing is not None and not self.read_paused:
            if now_s - self._window_start_s > limits.body_window_s:
                if self._window_bytes < limits.body_window_bytes:
                    self._state.metrics.events["slow_body"] += 1
                    self._refuse(
                        HttpError(408, "The request body came too slowly.", code="request_timeout", close=True)
                    )
                    return
                self._window_start_s, self._window_bytes = now_s, 0
            allowed_s = limits.body_grace_s + parsing.body_bytes / limits.body_bytes_per_s
            if now_s - self._body_since_s > allowed_s:
                # A minimum per window alone would keep it open for hours.
                self._state.metrics.events["slow_body"] += 1
                self._refuse(HttpError(408, "The request body came too slowly.", code="request_timeout", close=True))
                return
        if self.active is not None:
            self.active.tick(now_s)
        elif parsing is None and now_s > self._deadline_s:
            if self._parser is not None and self._parser.head_started:
                self._state.metrics.events["slow_head"] += 1
                self._refuse(HttpError(408, "The request head came too slowly.", code="request_timeout", close=True))
            else:
                # It has a deadline: what a client has not read yet would keep the connection open for ever.
                self._close(read_rest=False)

    def keys_changed(self, callers: Mapping[str, Caller]) -> None:
        for waiting in self._waiting:
            if isinstance(waiting, Request):
                waiting.refusal = waiting.refusal or self._judged_anew(waiting, callers)
        request, parsing = self.active_request, self.parsing
        if parsing is not None and parsing is not request and parsing.refusal is None:
            refusal = self._judged_anew(parsing, callers)
            if refusal is not None:
                self._state.metrics.events["revoked_in_flight"] += 1
                if self.active is None:
                    self._refuse(refusal)
                    return
                parsing.refusal = refusal  # its turn comes
        # Last, because the request behind it begins at once.
        if self.active is not None and request is not None and request.caller is not None:
            ended = self._ended(request, request.caller, callers)
            if ended is None:
                # It may be held, or its earlier turns be fetched, and is judged again then.
                request.caller = callers[request.caller.id]
            elif request.route is not ROTATION or not request.complete:
                # What asks for a new secret is answered: the asker's own may be the old one.
                self._state.metrics.events["revoked_in_flight"] += 1
                self.active.cancel(ended)

    def _ended(self, request: Request, before: Caller, callers: Mapping[str, Caller]) -> HttpError | None:
        """Why nothing may come by the key, its secret or the page login that it came by any more. The request that
        ended a login is still answered. before: its caller."""
        caller = callers.get(before.id)
        if caller is None or (not request.session and caller.secret != before.secret):
            return errors.key_ended(before.expires_s)
        if request.session and request.session not in self._state.session_ids and request.route is not SESSIONS:
            return errors.session_ended()
        return None

    def _judged_anew(self, request: Request, callers: Mapping[str, Caller]) -> HttpError | None:
        """Why an admitted request is no longer allowed; None if it still is."""
        if request.caller is None or request.route is None:
            return None
        ended = self._ended(request, request.caller, callers)
        if ended is not None:
            ended.close = True
            return ended
        request.caller = caller = callers[request.caller.id]
        try:
            check_scopes(request.route, caller)
        except HttpError as refusal:
            refusal.close = True
            return refusal
        return None

    def stop(self) -> None:
        if self.active is None and self.parsing is None:
            self.close()


def _keep(chunks: list[bytes], data: bytes) -> None:
    """Adds to what has arrived of a body. Small pieces become one: one of two bytes, in a packet of its own, would take
    the memory of 56."""
    if chunks and len(data) < _SMALL_BYTES and len(chunks[-1]) < _SMALL_BYTES:
        chunks[-1] = b"%b%b" % (chunks[-1], data)
    else:
        chunks.append(data)
