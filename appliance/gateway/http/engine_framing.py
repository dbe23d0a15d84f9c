"""Answers of engines that need no parser: whole plain ones, and whole chunks of streams. Pure.

Most answers are one or the other, and an engine is no stranger whose framing needs a parser's distrust. Whatever looks
different in any way is left to httptools.
"""

from __future__ import annotations

import re
from typing import Final

OK: Final = b"HTTP/1.1 200 OK\r\n"
_SIZES: Final = {b"%x" % size: size for size in range(1, 8192)}
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ([0-9]{1,12})\r\n", re.IGNORECASE)


def whole_chunks(data: bytes) -> bytes:
    """What stands in these chunks, if `data` is nothing but whole ones, as engines write them, and none is the last.

    Empty otherwise: then the parser, which stands where they begin, must look at these bytes.
    """
    end = data.find(b"\r\n", 0, 8)
    size = _SIZES.get(data[:end], 0) if end > 0 else 0
    start, total = end + 2, len(data)
    at = start + size
    if not size or data[at : at + 2] != b"\r\n":
        return b""
    if at + 2 == total:
        return data[start:at]
    pieces = [data[start:at]]
    while at + 2 < total:
        at += 2
        end = data.find(b"\r\n", at, at + 8)
        size = _SIZES.get(data[at:end], 0) if end > 0 else 0
        start = end + 2
        at = start + size
        if not size or data[at : at + 2] != b"\r\n":
            return b""
        pieces.append(data[start:at])
    return b"".join(pieces)


class PlainHead:
    """The head of a plain answer around the digits of its length; the next one mostly has the same (its date lasts a
    second)."""

    def __init__(self, before: bytes, after: bytes, headers: dict[bytes, bytes], closes: bool) -> None:
        self.before = before
        self.after = after
        self.headers = headers
        self.closes = closes

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is this head, with any length, and exactly the body that it announces."""
        before, after = self.before, self.after
        start = len(before)
        if data[:start] != before:
            return None
        end = data.find(b"\r", start)
        body = end + len(after)
        if end < 0 or data[end:body] != after:
            return None
        digits = data[start:end]
        return data[body:] if digits.isdigit() and len(data) - body == int(digits) else None


def plain_head(data: bytes) -> PlainHead | None:
    """Of data that begins with a status line of 200. None: no head of a plain answer of known length."""
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
