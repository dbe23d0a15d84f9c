"""Relays requests to the controller and its answers to clients, and sends the gateway's own requests to it.

Bodies of any size stream in both directions at the speed of the slower side; only error answers are buffered, to give
them the API's format."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.requests.request_check import Checked, check_depth, check_object
from appliance.gateway.server.exchange import Exchange, Headers
from appliance.gateway.server.state import State, read_up_to

METRICS_WAIT_S: Final = 2.0
RETRY_S: Final = 0.5
# Waiting copies are sent together, up to TOGETHER_BYTES. After a 5xx they are sent again, at most MOST_FAILURES times.
TOGETHER_BYTES: Final = 1 << 20
MOST_FAILURES: Final = 3
_POLL_S: Final = 0.05
# Headers that are not relayed in either direction. Some servers treat `_` and `-` in header names as equal, so a
# client's x_appliance_scopes is dropped too.
_OF_A_HOP: Final = rb"connection|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|content-length|x-request-id"
_OURS: Final = rb"x[-_]appliance[-_].*"
_NOT_UPSTREAM: Final = re.compile(
    rb"%b|%b|authorization|x-api-key|cookie|expect|host|(x-)?forwarded.*|x-real-ip" % (_OF_A_HOP, _OURS)
)
_NOT_DOWNSTREAM: Final = re.compile(rb"%b|%b|date|server|set-cookie" % (_OF_A_HOP, _OURS))

log = logging.getLogger("appliance.gateway")


class Controller:
    """Client of the controller, and queue of copies of responses and chat completions for its store. A client's answer
    does not wait for its copy. While the controller is unreachable, copies wait here up to `response_copies_bytes`;
    later answers are not stored, and their `store` field is false. The controller ignores a repeated copy."""

    def __init__(self, state: State) -> None:
        self._state, self._copies = state, asyncio.Queue[bytes]()
        # Connections are used once: the controller may close an idle one under a request that must not be sent twice.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(state.config.controller_socket, limit=0, force_close=True),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=state.limits.upstream_silence_s),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            # With `Connection: close`, a server that refuses a body unread cuts off its own answer.
            headers={"Connection": "keep-alive"},
        )
        self.copies = self.copies_bytes = 0
        self._away = False

    async def relay(self, exchange: Exchange, body: bytes | None = None) -> None:
        """Relay a request to the controller and its answer back. body: the request's body, if already read."""
        state, wait_s = self._state, self._state.limits.controller_wait_s
        passing = _passing(exchange.headers, _NOT_UPSTREAM)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in passing]
        headers += identity(exchange.request_id, state.token, exchange)
        data: bytes | AsyncIterator[bytes] | None = body
        if body is None and (exchange.chunked or exchange.content_length):
            data = exchange.pieces()
            if exchange.content_length is not None:
                headers.append(("content-length", str(exchange.content_length)))
        async with self._ask(exchange.method, exchange.target, headers, data, wait_s) as response:
            if response.status >= 400:
                error = errors.from_upstream(response.status, await read_up_to(response.content))
                error.allow = response.headers.get("allow")
                error.should_retry = False if response.headers.get("x-should-retry") == "false" else None
                if after := response.headers.get("retry-after"):
                    error.retry_after_s = min(int(after), errors.MAX_RETRY_AFTER_S)
                raise error
            exchange.first_byte_s = time.monotonic()
            received = {name.lower(): value for name, value in response.raw_headers}
            sent = [*_passing(received, _NOT_DOWNSTREAM), (b"x-content-type-options", b"nosniff")]
            if (cookie := received.get(b"x-appliance-cookie")) is not None:  # `ID=HALF; Max-Age=…`
                tls = state.config.tls_cert_path is not None and not cookie.endswith(b"; Secure")
                cookie += b"; Secure; HttpOnly; SameSite=Strict" if tls else b"; HttpOnly; SameSite=Strict"
                sent += [(b"set-cookie", b"%b; Path=%b" % (cookie, path)) for path in (b"/admin/v1", b"/v1")]
            if b"content-length" in received and response.status not in (204, 304):
                sent.append((b"content-length", received[b"content-length"]))
            await exchange.begin(response.status, sent)
            if not exchange.head_only:  # an answer to HEAD must not wait for the body of an endless stream
                async for piece in response.content.iter_any():
                    await exchange.write(piece)
            await exchange.finish()

    @asynccontextmanager
    async def _ask(
        self,
        method: bytes,
        target: bytes,
        headers: list[tuple[str, str]],
        data: bytes | AsyncIterator[bytes] | None = None,
        wait_s: float = 0.0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. Raises HttpError 503 for an unreachable controller, 502 if it breaks off, 504 on timeout.

        wait_s: seconds that an unsent request, or a GET, waits for a controller that restarts."""
        state = self._state
        url = URL(f"http://appliance{target.decode('ascii', 'replace')}", encoded=True)
        options: Any = {"headers": headers, "data": data, "allow_redirects": False}
        until_s, answered = time.monotonic() + wait_s, False
        while True:
            try:
                async with self.session.request(method.decode(), url, **options) as response:
                    answered = True
                    yield response
                    return
            except aiohttp.SocketTimeoutError:
                raise HttpError(504, "The controller did not answer in time.", code="timeout") from None
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error.__cause__, HttpError):
                    raise error.__cause__ from None  # reading the client's body failed
                may_retry = not answered and (isinstance(error, aiohttp.ClientConnectorError) or method == b"GET")
                if may_retry and time.monotonic() < until_s:
                    await asyncio.sleep(_POLL_S)
                    continue
                state.metrics.events["controller_away"] += 1
                away = errors.unavailable("This box's controller is restarting. Please retry.", "controller_away", 2)
                away.status = 503 if may_retry else 502
                raise away from None

    async def metrics(self, exchange: Exchange) -> bytes:
        """Return the controller's metrics; empty if it does not answer."""
        try:
            headers = identity(exchange.request_id, self._state.token, exchange)
            async with asyncio.timeout(METRICS_WAIT_S), self._ask(b"GET", b"/admin/v1/metrics", headers) as response:
                return await response.read() if response.status == 200 else b""
        except (HttpError, TimeoutError):
            return b""

    async def with_previous(self, exchange: Exchange, data: dict[str, Any], checked: Checked) -> Checked:
        """Check a request with `previous_response_id` again, with the whole conversation as input. Raises HttpError.

        data: the client's body."""
        state, transcript, limits = self._state, checked.transcript, self._state.limits
        limit, headers = limits.inference_body_bytes, identity(exchange.request_id, state.token, exchange)
        assert transcript is not None
        target = b"/internal/responses/context?id=%b" % quote(transcript.previous_id, safe="").encode()
        async with self._ask(b"GET", target, headers, wait_s=limits.controller_wait_s) as response:
            earlier_items = await read_up_to(response.content, limit + 1)
            if response.status != 200:
                raise errors.from_upstream(response.status, earlier_items)
        nbytes = exchange.body_bytes + len(earlier_items)
        if nbytes > limit:
            raise errors.body_too_large(limit)
        state.take_body(exchange, len(earlier_items))
        items = data["input"]
        items = [{"type": "message", "role": "user", "content": items}] if isinstance(items, str) else items
        merged = {**data, "input": orjson.loads(earlier_items) + items, "previous_response_id": None}
        check_depth(merged, limits.json_depth)
        checked = check_object(exchange.route, merged, nbytes, limits)
        checked.transcript = transcript
        return checked

    # -- copies

    @property
    def delivering(self) -> bool:
        """Whether copies are waiting, and the controller answered when copies were last sent."""
        return self.copies > 0 and not self._away

    def keep(self, copy: bytes) -> None:
        self.copies += 1
        self.copies_bytes += len(copy)
        self._copies.put_nowait(copy)

    async def send_copies(self) -> None:
        """Send waiting copies until cancelled, several in one request."""
        while True:
            copies, failures = [await self._copies.get()], 0
            while not self._copies.empty() and sum(map(len, copies)) < TOGETHER_BYTES:
                copies.append(self._copies.get_nowait())
            while not (status := await self._store(copies)) or (status >= 500 and failures < MOST_FAILURES):
                self._away, failures = True, failures + (status > 0)
                await asyncio.sleep(RETRY_S)
            self._away = False
            if status >= 300:  # a retry would get the same answer
                log.error("%d responses were answered but not stored: the controller returned %d", len(copies), status)
                self._state.metrics.events["responses_not_stored"] += len(copies)
            self.copies -= len(copies)
            self.copies_bytes -= sum(map(len, copies))

    async def _store(self, copies: list[bytes]) -> int:
        """Send copies; return the controller's status, 0 if it did not answer."""
        headers = [("content-type", "application/json"), *identity(self._state.new_request_id(), self._state.token)]
        try:
            async with self._ask(b"POST", b"/internal/responses", headers, b"[%b]" % b",".join(copies)) as response:
                return response.status
        except HttpError:
            return 0


def identity(request_id: bytes, token: bytes, exchange: Exchange | None = None) -> list[tuple[str, str]]:
    """Return headers with the id of a request's key, and the token that authenticates the gateway
    (controller.interfaces.principal). exchange: None for requests of the gateway itself."""
    names = [("x-appliance-key-id", "gateway"), ("x-appliance-scopes", "gateway")]
    if exchange is not None and exchange.route.kind != "login":  # a request to log in has no key yet
        caller = exchange.caller
        names = [("x-appliance-key-id", caller.id), ("x-appliance-scopes", ",".join(sorted(caller.scopes)))]
        names += [("x-appliance-session", exchange.session)] if exchange.session else []
    return [*names, ("x-request-id", request_id.decode()), ("x-appliance-gateway", token.decode())]


def _passing(headers: Headers, stops: re.Pattern[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that neither match `stops` nor are listed in the Connection header."""
    of_connection = {part.strip().lower() for part in headers.get(b"connection", b"").split(b",")}
    return [(name, value) for name, value in headers.items() if name not in of_connection and not stops.fullmatch(name)]
