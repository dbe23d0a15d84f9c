"""Parses a client's bytes into requests with httptools, limits the memory it uses, and skips the parser for a head
equal to the last one.

It calls the connection with a request's head, each piece of its body, and its end. `feed` raises HttpErrors of those
calls like its own; then the connection is unusable.
"""

from __future__ import annotations

from typing import Final

import httptools

from appliance.gateway.access.request import Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http.client import Client
from appliance.gateway.server.repeated_head import RepeatedHead, repeated_head
from appliance.gateway.state.state import State

# A header that may appear only once: with two, two parsers could disagree.
_ONCE: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect"}
)
# After this many different heads in a row a connection stops remembering them.
_DIFFERING_HEADS: Final = 4


class Closing(Exception):
    """Raised into the parser to skip bytes after a response that ends the connection."""


class Receiver(Client):
    """A client's connection as its parser sees it. `RequestParser.feed` passes its HttpErrors on.

    parsing: the request whose head has arrived and whose body is incomplete.
    """

    parsing: Request | None = None

    def request_begins(self) -> None:
        """The first byte of a head has arrived."""
        raise NotImplementedError

    def head_complete(self, request: Request) -> None:
        raise NotImplementedError

    def body_data(self, data: bytes) -> None:
        """More of the body of the request being parsed."""
        raise NotImplementedError

    def request_complete(self, request: Request) -> None:
        raise NotImplementedError

    def begin(self, request: Request) -> None:
        """The request is complete, or its body is streamed, and it is its turn."""
        raise NotImplementedError


class RequestParser:
    """The parser of one connection. head_started: a request's head has begun and is incomplete."""

    head_started: bool = False
    _method: bytes = b""
    _version: bytes = b""
    _url: bytes = b""
    _header_count: int = 0
    _head_bytes: int = 0
    _unparsed_head: int = 0
    _unparsed_body: int = 0
    _in_head: bool = True
    _offers_upgrade: bool = False
    _between: bool = True
    _fed: bytes | None = None
    _repeat: RepeatedHead | None = None
    _differing: int = 0

    def __init__(self, state: State, connection: Receiver) -> None:
        self._state = state
        self._connection = connection
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Raises HttpError for bytes that are not HTTP, too large, or refused by the connection."""
        between, self._between = self._between, False
        if between and self._differing < _DIFFERING_HEADS:
            if self._repeat is not None and self._repeated(self._repeat, data):
                return
            self._fed = data
        else:
            self._fed = None
        self._unparsed_body += len(data)
        while True:
            parser = self._parser
            assert parser is not None
            try:
                parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer(data[offer.args[0] :])
            except httptools.HttpParserCallbackError as error:
                cause = error.__context__
                if isinstance(cause, Closing):
                    return
                if not isinstance(cause, HttpError):
                    raise
                raise cause from None
            except httptools.HttpParserError as error:
                self._state.metrics.events["bad_http"] += 1
                raise errors.protocol_error(f"The request is not well-formed HTTP/1.1: {error}.") from None
        if self._pieces:
            self._body_came()
        if self._in_head:
            # httptools' parser still holds the bytes of a head that it has not reported.
            self._unparsed_head += len(data)
            if self._unparsed_head > self._state.limits.head_bytes + len(data):
                raise errors.protocol_error("The request head is too large.", 431)
        elif self._unparsed_body > self._state.limits.head_bytes + len(data):
            # An endless line of a trailer, of which httptools makes one text again and again, or extension of a chunk.
            raise errors.protocol_error("The request has too many bytes besides its body.")

    def _body_came(self) -> None:
        """All pieces of the body in what was fed, as one: a chunk of two bytes would take the memory of 56."""
        pieces, self._pieces = self._pieces, []
        self._connection.body_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        """Break the reference cycle with the parser, so that a closed connection does not wait for garbage
        collection."""
        self._parser = None

    def _without_offer(self, rest: bytes) -> bytes:
        """A request that offers another protocol, as bytes for a new parser: its head without the offer, which a server
        may ignore (RFC 9110, 7.8), and what followed it. httptools would leave its body unread."""
        request_line = b"%b %b HTTP/%b" % (self._method, self._url, self._version)
        lines = [b"%b: %b" % line for line in self._headers.items() if line[0] != b"upgrade"]
        self._offers_upgrade = False
        self._fed = None
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((request_line, *lines, b"", rest))

    def _repeated(self, repeat: RepeatedHead, data: bytes) -> bool:
        """Begin a request whose head is known. False: httptools must look at these bytes."""
        state, connection = self._state, self._connection
        # A new table may have revoked its key or changed its permissions. A client that does not read gets no more
        # answers.
        if connection.active is not None or connection.write_paused:
            return False
        if state.stopping or repeat.table != state.tables_applied:
            return False
        body = repeat.body_of(data)
        if body is None:
            self._differing += 1
            return False
        if len(body) > state.limits.inference_body_bytes:
            return False
        request = repeat.again(body)
        try:
            state.take_body(request, len(body))
        except HttpError:
            return False
        self._differing = 0
        self._between = True
        request.request_id = state.new_request_id()
        connection.begin(request)
        return True

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._connection.request_begins()
        self.head_started = True
        self._between = False
        self._url = b""
        self._headers = {}
        self._header_count = self._head_bytes = self._unparsed_head = self._unparsed_body = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._state.limits.target_bytes:
            raise errors.protocol_error("The request URL is too long.", 414)

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._state.limits
        self._header_count += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > limits.head_bytes or self._header_count > limits.header_count:
            raise errors.protocol_error("The request has too many or too large headers.", 431)
        if not self._in_head:
            self._unparsed_body = 0
            return  # trailers: counted, and dropped
        name = name.lower()
        headers = self._headers
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            raise errors.protocol_error(f"The header {name.decode('latin-1')} was sent twice.")
        else:
            headers[name] = b"%b, %b" % (headers[name], value)

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        assert parser is not None
        self._in_head = self.head_started = False
        if parser.should_upgrade():
            self._method, self._version = parser.get_method(), parser.get_http_version().encode()
            if self._method == b"CONNECT":
                raise errors.protocol_error("CONNECT is not supported.")
            self._offers_upgrade = True
            return
        request = Request(parser.get_method(), self._url, headers, parser.get_http_version())
        self._connection.parsing = request
        length = headers.get(b"content-length")
        if length is not None:
            request.content_length = int(length)
        if request.version != "1.1":
            _check_version(request)
        elif b"host" not in headers:
            raise errors.protocol_error("The request has no Host header.")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked":
                raise errors.protocol_error("Only Transfer-Encoding: chunked is understood.", 501)
            request.chunked = True
        request.keep_alive = parser.should_keep_alive()
        self._connection.head_complete(request)

    def on_body(self, data: bytes) -> None:
        self._unparsed_body = 0
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return  # parsed again without the offer
        if self._pieces:
            self._body_came()
        request = self._connection.parsing
        if request is None:
            return  # answered and closing
        self._in_head = self._between = True
        self._unparsed_head = 0
        if self._fed is not None:
            self._repeat = repeated_head(self._fed, request, self._state.tables_applied)
        self._connection.request_complete(request)


def _check_version(request: Request) -> None:
    if request.version != "1.0":
        raise errors.protocol_error(f"HTTP/{request.version} is not supported, use HTTP/1.1.", 505)
    if b"transfer-encoding" in request.headers:
        raise errors.protocol_error("Transfer-Encoding is not part of HTTP/1.0.")
