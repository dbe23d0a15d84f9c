"""Writes the access log: one JSON object per request and line, in batches so that no request waits for a disk."""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Final

import orjson

from appliance.gateway.access.request import Request
from appliance.gateway.http import wire

log = logging.getLogger("appliance.gateway")

_FLUSH_LINES = 4096
_REMEMBERED = 1024

# Names that people give keys (often their own) and pipelines: a person who is forgotten leaves none here. Ids of keys
# stay.
_NAMED: Final = re.compile(rb"(/(?:keys|pipelines)/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")

# Key, path, method, model, version, replica.
Who = tuple[str, bytes, bytes, str, str, str]


_THOUSANDTHS: Final = [b".%03d" % n for n in range(1000)]


def _seconds(seconds: float) -> bytes:
    """The number to the microsecond, like %.6f, which costs as much as half of the line."""
    if not 0 <= seconds < 1:
        return b"%.6f" % seconds
    micros = int(seconds * 1_000_000)
    return b"0%b%b" % (_THOUSANDTHS[micros // 1000], _THOUSANDTHS[micros % 1000][1:])


class AccessLog:
    """Appends to `path` (mode 0600); None: keeps nothing. A full or failing disk costs log lines, never requests."""

    def __init__(self, path: str | None) -> None:
        self.enabled = path is not None
        self._lines: list[bytes] = []
        self._lost = 0
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._second, self._second_text = 0, b""
        self._who: dict[Who, bytes] = {}
        self._unix_offset_s = time.time() - time.monotonic()

    def add(self, request: Request, now_s: float) -> None:
        """now_s: of the end of the response, by the monotonic clock. ttft_s, duration_s: from the complete request to
        the first body byte and to the end. Fields that a request has no value for are null.

        Formatted by hand, half of it from a cache: a JSON encoder takes four times as long per request.
        """
        unix_s = now_s + self._unix_offset_s
        second = int(unix_s)
        if second != self._second:
            self._second, self._second_text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        received_s, first_byte_s, tokens, caller = (
            request.received_s or now_s,
            request.first_byte_s,
            request.tokens,
            request.caller,
        )
        who = (
            "" if caller is None else caller.id,
            request.path,
            b"HEAD" if request.head_only else request.method,
            request.model,
            request.model_version,
            request.replica,
        )
        self._lines.append(
            b'{"time":"%b%bZ","level":"info","process":"gateway","event":"request","request_id":"%b",%b,"status":%b,'
            b'"ttft_s":%b,"duration_s":%b,"prompt_tokens":%b,"completion_tokens":%b,"in_bytes":%b,"out_bytes":%b,'
            b'"trace_id":%b}\n'
            % (
                self._second_text,
                _THOUSANDTHS[int((unix_s - second) * 1000)],
                request.request_id,
                self._who.get(who) or self._remember(who),
                wire.digits(request.status),
                _seconds(first_byte_s - received_s) if first_byte_s else b"null",
                _seconds(now_s - received_s),
                wire.digits(tokens.prompt),
                wire.digits(tokens.completion),
                wire.digits(request.body_bytes),
                wire.digits(request.sent_bytes),
                b'"%b"' % request.trace[3:35] if request.trace else b"null",
            )
        )
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def _remember(self, who: Who) -> bytes:
        """The fields that most lines have in common with an earlier one."""
        key_id, path, method, model, version, replica = who
        fields = {
            "key_id": key_id or None,
            "method": method.decode("latin-1"),
            "path": _NAMED.sub(rb"\1*", path)[:256].decode("latin-1"),
            "model": model or None,
            "version": version or None,
            "replica": replica or None,
        }
        if len(self._who) >= _REMEMBERED:
            self._who.clear()  # clients choose the paths
        self._who[who] = found = orjson.dumps(fields)[1:-1]
        return found

    def flush(self) -> None:
        """Also called a few times a second, so that it soon follows a change of the system clock."""
        self._unix_offset_s = time.time() - time.monotonic()
        if self._lines and self._file is not None:
            lines, self._lines = self._lines, []
            try:
                os.write(self._file, b"".join(lines))
            except OSError as error:
                if not self._lost:
                    log.warning("access log: write failed (%s), lines are dropped", error.strerror)
                self._lost += len(lines)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self.enabled = False
