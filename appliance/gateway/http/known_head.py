"""Skips the parser for a message whose head equals the last one except for the digits of its length. Pure.

Both sides have such messages: a client repeats its headers (server/repeated_head.py), and an engine answers with the
same ones (its date changes once a second). httptools parses any head that differs.
"""

from __future__ import annotations

import re
from typing import Final

OK: Final = b"HTTP/1.1 200 OK\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ([0-9]{1,12})\r\n", re.IGNORECASE)
_DIGITS: Final = 12


class KnownHead:
    """The bytes before and after the digits of its length."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is this head, with any length, and exactly the body that it announces."""
        before, after = self._before, self._after
        start = len(before)
        if data[:start] != before:
            return None
        end = data.find(b"\r", start, start + _DIGITS + 1)
        body = end + len(after)
        if end < 0 or data[end:body] != after:
            return None
        digits = data[start:end]
        return data[body:] if digits.isdigit() and len(data) - body == int(digits) else None


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
