"""Implements the HTTP/1.1 client to engines and controller: pooled Unix sockets, one response at a time.

It makes one `upstream_data` call per socket read, however many chunks it held: one read becomes one client write.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from time import monotonic
from typing import Final

import httptools
from mypy_extensions import mypyc_attr

from appliance.gateway.http import wire
from appliance.gateway.http.connection import Connection
from appliance.gateway.http.known_head import OK, PlainHead, plain_head
from appliance.gateway.http.outbox import Outbox

CONNECT_TIMEOUT_S = 5.0
FULL_BACKLOG_RETRY_S = 0.01
RESPONSE_HEAD_BYTES = 64 * 1024
CHUNKED: Final = -1
IDLE_S: Final = 4.0
MOST_IDLE: Final = 256


# Test doubles are not compiled; allowing them costs compiled classes nothing.
@mypyc_attr(allow_interpreted_subclasses=True)
class UpstreamListener:
    """Receives a response. A class, not a Protocol, so that compiled code calls it through its method table."""

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        """The head has arrived (`conn.status`, `conn.headers`); `body` is new data, possibly empty; `done`: response
        complete."""
        raise NotImplementedError

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        """The connection ended before the response was complete."""
        raise NotImplementedError

    def upstream_paused(self, paused: bool) -> None:
        """The upstream's send buffer is full (or has drained). Not needed if a request is written whole."""
        return


class UpstreamConnection(Connection):
    """One connection. Invariant: it is in the pool exactly when it has no listener, is open, and its last request and
    response were both complete, so that the next bytes in either direction are a head.

    read_s: time of the last read; for an idle connection, the start of idleness. malformed: the head of the answer
    cannot be read, or is too long: the other side lives, and answers others.
    """

    status: int = 0
    _head_done: bool = False
    _done: bool = False
    _head_bytes: int = 0
    _keep_alive: bool = False
    reused: bool = False
    answered: bool = False
    malformed: bool = False
    read_s: float = 0.0
    # Bytes of the request's body that its head announced but are not yet written; `CHUNKED`: until `end_body`.
    _owes: int = 0
    _last: PlainHead | None = None

    def __init__(self, pool: UpstreamPool, path: str) -> None:
        super().__init__(pool.outbox)
        self._pool = pool
        self.path = path
        self._parser: httptools.HttpResponseParser | None = None
        self.listener: UpstreamListener | None = None
        self.headers: dict[bytes, bytes] = {}
        self._chunks: list[bytes] = []

    # -- for the listener

    def start(self, listener: UpstreamListener, data: bytes, owes: int = 0) -> None:
        """Send a request for `listener`: all of it, or its head followed by `write_body` calls.

        owes: length of the body still to come; CHUNKED: until `end_body`.
        """
        assert self.listener is None and self.transport is not None
        self.listener = listener
        self._owes = owes
        self._head_done = self._done = self.answered = False
        self._head_bytes = 0
        self.write(data)

    def write_body(self, data: bytes) -> None:
        """More of the body. Excess over the announced length closes the connection: it would be parsed as a head."""
        if self._owes == CHUNKED:
            if data:  # an empty chunk is the end
                self.write(wire.chunk(data))
        elif len(data) <= self._owes:
            self._owes -= len(data)
            self.write(data)
        elif self.listener is not None:
            self._lost(self.listener)

    def end_body(self) -> None:
        if self._owes == CHUNKED:
            self._owes = 0
            self.write(wire.LAST_CHUNK)

    def abort(self) -> None:
        """Close the connection now: in HTTP/1.1 the only way to tell an engine to stop."""
        self.listener = None
        super().abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.read_s = monotonic()
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        listener = self.listener
        if listener is None or self._parser is None:
            # Unsolicited bytes: nothing shows which request they belong to.
            self.abort()
            return
        self.answered = True
        self.read_s = monotonic()
        if not self._head_done:
            if not self._head_bytes:
                if self._whole(listener, data):
                    return
                self.headers = {}
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.malformed = not self._head_done
            self._lost(listener)
            return
        if not self._head_done:
            if self._head_bytes > RESPONSE_HEAD_BYTES:
                self.malformed = True
                self._lost(listener)
            return
        chunks = self._chunks
        if not chunks:
            body = b""
        elif len(chunks) == 1:
            body = chunks[0]
            self._chunks = []
        else:
            body = b"".join(chunks)
            self._chunks = []
        if not self._done:
            listener.upstream_data(self, body, False)
            return
        self._response_ended(self._keep_alive)
        listener.upstream_data(self, body, True)

    def _whole(self, listener: UpstreamListener, data: bytes) -> bool:
        """Take a complete plain answer that came in one piece. False: the parser must look at these bytes.

        Most engine answers are like that, and an engine is trusted, so its framing needs no strict parser.
        """
        last = self._last
        body = None if last is None else last.body_of(data)
        if body is None and data[: len(OK)] == OK:
            last = self._last = plain_head(data)
            body = None if last is None else last.body_of(data)
        if last is None or body is None:
            return False
        self.status, self.headers = 200, last.headers
        self._response_ended(not last.closes)
        listener.upstream_data(self, body, True)
        return True

    def _response_ended(self, keep_alive: bool) -> None:
        self.listener = None
        if self.read_paused:
            self.resume_reading()
        if self._owes:
            # Answered early. The upstream would take the next bytes written here for the rest of that body.
            self.abort()
        elif keep_alive:
            self._pool.put(self)
        else:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._parser = None
        self._pool.forget(self)
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.upstream_lost(self)

    def pause_writing(self) -> None:
        if self.listener is not None:
            self.listener.upstream_paused(True)

    def resume_writing(self) -> None:
        if self.listener is not None:
            self.listener.upstream_paused(False)

    def _lost(self, listener: UpstreamListener) -> None:
        self.abort()
        listener.upstream_lost(self)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self._done:
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        # 1xx answers precede the real head; llhttp starts over with the next message.
        self._head_done = self.status >= 200
        # Read now: llhttp forgets it once the message is complete.
        self._keep_alive = self._parser.should_keep_alive() and not (
            # No body may follow, whatever the head announces; if bytes follow, they are not a response head.
            self.status in (204, 304)
            and (self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers)
        )
        if not self._head_done:
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._done = self._head_done


def cancel(connecting: asyncio.Task[None] | None, conn: UpstreamConnection | None) -> None:
    """Drop the upstream of a request that no longer needs it, connecting (`UpstreamPool.connect`) or connected: the
    listener gets no more calls."""
    if connecting is not None:
        connecting.cancel()
    if conn is not None:
        conn.abort()


class UpstreamPool:
    """Idle connections by socket path, youngest first; the server's keep-alive must be longer than IDLE_S."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def acquire(self, path: str) -> UpstreamConnection | None:
        """An idle connection, or None: then `connect`."""
        idle = self._idle.get(path)
        while idle:
            conn = idle.pop()
            if conn.transport is not None and not conn.transport.is_closing():
                conn.reused = True
                return conn
        return None

    def connect(
        self, path: str, done: Callable[[UpstreamConnection | OSError], None], *, wait_s: float = 0.0
    ) -> asyncio.Task[None]:
        """Open a connection and call `done` with it or with the OSError; `cancel` ends the task.

        wait_s: how long to retry a refused or missing socket (a restarting server).
        """
        task = asyncio.get_running_loop().create_task(self._connect(path, done, wait_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self, path: str, done: Callable[[UpstreamConnection | OSError], None], wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        started = monotonic()
        pause_s = FULL_BACKLOG_RETRY_S
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, conn = await loop.create_unix_connection(  # type: ignore[type-var]
                        lambda: UpstreamConnection(self, path), path
                    )
            except OSError as error:
                waited = monotonic() - started
                # A full listen backlog (EAGAIN) is a busy server, not a dead one.
                patience = CONNECT_TIMEOUT_S if error.errno == errno.EAGAIN else wait_s
                if waited >= patience:
                    done(error)
                    return
            else:
                done(conn)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.25)

    def put(self, conn: UpstreamConnection) -> None:
        idle = self._idle.get(conn.path)
        if idle is None:
            idle = self._idle[conn.path] = []
        if len(idle) >= MOST_IDLE:
            conn.abort()
            return
        idle.append(conn)

    def forget(self, conn: UpstreamConnection) -> None:
        idle = self._idle.get(conn.path)
        if idle and conn in idle:
            idle.remove(conn)

    def sweep(self, now_s: float, wanted: set[str]) -> None:
        """Close connections that are idle for too long or lead to sockets no longer in use."""
        for path in list(self._idle):
            idle = self._idle[path]
            keep = [c for c in idle if path in wanted and now_s - c.read_s < IDLE_S]
            gone = [c for c in idle if c not in keep] if len(keep) != len(idle) else []
            self._idle[path] = keep
            for conn in gone:
                conn.abort()
            if not keep:
                del self._idle[path]

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for idle in list(self._idle.values()):
            for conn in list(idle):
                conn.abort()
        self._idle.clear()
