"""Access log: one JSON object per request and line, written in batches so that no request waits for a disk."""

from __future__ import annotations

import logging
import os
import time

import orjson

from .wire import Request

log = logging.getLogger("appliance.gateway")

_FLUSH_LINES = 4096


class AccessLog:
    """Appends to `path` (mode 0600); None: keeps nothing. A full or failing disk costs log lines, never requests."""

    def __init__(self, path: str | None) -> None:
        self.enabled = path is not None
        self._lines: list[bytes] = []
        self._lost = 0
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, request: Request) -> None:
        """time_ms: Unix time of the end; us: from the complete request to the end of the response."""
        now = time.monotonic()
        received = request.received_s or now
        principal, first_byte_s = request.principal, request.first_byte_s
        self._lines.append(
            orjson.dumps(
                {
                    "time_ms": int(time.time() * 1000),
                    "request": request.request_id.decode(),
                    "key": principal.id if principal is not None else None,
                    "method": request.method.decode("latin-1"),
                    "path": request.path[:256].decode("latin-1"),
                    "model": request.model or None,
                    "status": request.status,
                    "in_bytes": request.body_bytes,
                    "out_bytes": request.sent_bytes,
                    "first_byte_us": int((first_byte_s - received) * 1e6) if first_byte_s else None,
                    "us": int((now - received) * 1e6),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
        )
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        if self._lines and self._file is not None:
            lines, self._lines = self._lines, []
            try:
                os.write(self._file, b"".join(lines))
            except OSError as error:
                if not self._lost:
                    log.warning("access log: cannot be written (%s), lines are dropped", error.strerror)
                self._lost += len(lines)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self.enabled = False
