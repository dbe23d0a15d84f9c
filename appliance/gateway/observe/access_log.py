"""Writes the access log: one JSON object per request and line."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Final

import orjson

from appliance.gateway.access.request import Request
from runtime.logs import timestamp

# Names that people give keys, often their own: a person who is forgotten leaves none here. Ids of keys stay.
_NAMED: Final = re.compile(rb"(/keys/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


class AccessLog:
    """Appends to `path`, a file of mode 0600; None: keeps nothing. A full disk costs lines, never requests."""

    def __init__(self, path: str | None) -> None:
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, request: Request, now_s: float) -> None:
        """Write a request's line when its response ends, at `now_s` by the monotonic clock.

        ttft_s, duration_s: from the complete request to the first body byte and to the end. Fields without a value are
        null.
        """
        if self._file < 0:
            return
        received_s, first_byte_s, caller = request.received_s or now_s, request.first_byte_s, request.caller
        fields = {
            "time": timestamp(time.time()),
            "level": "info",
            "process": "gateway",
            "event": "request",
            "request_id": request.request_id.decode("latin-1"),
            "key_id": caller.id or None,
            "method": "HEAD" if request.head_only else request.method.decode("latin-1"),
            "path": _NAMED.sub(rb"\1*", request.path)[:256].decode("latin-1"),
            "model": request.model or None,
            "version": request.model_version or None,
            "replica": request.replica or None,
            "status": request.status,
            "ttft_s": round(first_byte_s - received_s, 6) if first_byte_s else None,
            "duration_s": round(now_s - received_s, 6),
            "prompt_tokens": request.tokens.prompt,
            "completion_tokens": request.tokens.completion,
            "in_bytes": request.body_bytes,
            "out_bytes": request.sent_bytes,
            "trace_id": request.trace_id or None,
        }
        with contextlib.suppress(OSError):
            os.write(self._file, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
