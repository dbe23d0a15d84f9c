"""Writes the access log: one JSON object per request and line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Any, Final

import orjson

from appliance.gateway.access.request import Request
from runtime.logs import timestamp

log = logging.getLogger("appliance.gateway")

# Names that people give keys (often their own) and pipelines: a person who is forgotten leaves none here. Ids of keys
# stay.
_NAMED: Final = re.compile(rb"(/(?:keys|pipelines)/)(?!key_[A-Za-z0-9]{24}(?:/|\Z))[^/]+")


class _File(logging.FileHandler):
    """A file of mode 0600. A full or failing disk costs log lines, never requests."""

    def __init__(self, path: str) -> None:
        self._failed = False
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            log.warning("access log: cannot write, lines are dropped", exc_info=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"time": timestamp(record.created), "level": "info", "process": "gateway", "event": "request"}
        return orjson.dumps(head | record.__dict__["fields"]).decode()


class AccessLog:
    """Appends to `path`; None: keeps nothing."""

    def __init__(self, path: str | None) -> None:
        self._log = logging.Logger("appliance.gateway.requests")
        if path is not None:
            handler = _File(path)
            handler.setFormatter(_Line())
            self._log.addHandler(handler)

    @property
    def enabled(self) -> bool:
        return self._log.hasHandlers()

    def add(self, request: Request, now_s: float) -> None:
        """Write a request's line when its response ends, at `now_s` by the monotonic clock.

        ttft_s, duration_s: from the complete request to the first body byte and to the end. Fields without a value are
        null.
        """
        received_s, first_byte_s, caller = request.received_s or now_s, request.first_byte_s, request.caller
        fields = {
            "request_id": request.request_id.decode("latin-1"),
            "key_id": None if caller is None else caller.id,
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
        self._log.info("request", extra={"fields": fields})

    def close(self) -> None:
        for handler in list(self._log.handlers):
            self._log.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()
