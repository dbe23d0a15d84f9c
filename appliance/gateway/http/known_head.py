"""Skips the parser for a message whose head equals the last one except for the digits of its length. Pure.

Both sides have such messages: a client repeats its headers (server/repeated_head.py), and an engine answers with the
same ones (its date changes once a second). httptools parses any head that differs.
"""

from __future__ import annotations

import re
from typing import Final

from appliance.gateway.http.wire import digits

OK: Final = b"HTTP/1.1 200 OK\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ([0-9]{1,12})\r\n", re.IGNORECASE)


class KnownHead:
    """The bytes before and after the digits of its length."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._around = len(before) + len(after)

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is this head, with any length, and exactly the body that it announces."""
        # One comparison with the head that a body of this size would have; to look for the digits and to read them cost
        # 4 % of a plain request, on each side.
        length = _body_length(len(data) - self._around)
        if length < 0:
            return None
        head = b"%b%b%b" % (self._before, digits(length), self._after)
        start = len(head)
        return data[start:] if data[:start] == head else None


def _body_length(rest: int) -> int:
    """The length that is `rest` together with the number of its digits, -1 if none is."""
    if rest < 1:
        return -1
    length = rest - len(digits(rest))
    if length + len(digits(length)) != rest:
        length += 1  # `rest` may have one digit more
    return length if length + len(digits(length)) == rest else -1


class PlainHead(KnownHead):
    """The head of a plain answer of an engine."""

    def __init__(self, before: bytes, after: bytes, headers: dict[bytes, bytes], closes: bool) -> None:
        super().__init__(before, after)
        self.headers = headers
        self.closes = closes


def plain_head(data: bytes) -> PlainHead | None:
    """The head of data that begins with a status line of 200. None: no head of a plain answer of known length."""
    end = data.find(b"\r\n\r\n")
    headers: dict[bytes, bytes] = {}
    for line in data[len(OK) : end].split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if not colon:
            return None
        name = name.lower()
        if name in headers:
            return None
        headers[name] = value
    found = _LENGTH.search(data, 0, end + 4)
    if end < 0 or found is None or b"transfer-encoding" in headers or not headers[b"content-length"].isdigit():
        return None
    closes = b"connection" in headers
    return PlainHead(data[: found.start(1)], data[found.end(1) : end + 4], headers, closes)
