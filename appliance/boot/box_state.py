"""`box.json`: what the main process tells the commands about itself. Only the main process writes it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from runtime.replace_file import replace_file

log = logging.getLogger(__name__)


class BoxState:
    """Fields: pid, url, controller_socket, state (starting|ready|stopping|stopped|failed|killed), message,
    started_s (Unix time), troubles (of the processes that the main process supervises, in the form of
    `BackgroundTasks.degraded`)."""

    def __init__(self, path: Path):
        self._path = path
        self._fields: dict[str, Any] = {}

    def begin(self, **fields: Any) -> None:
        self._fields = {"state": "starting", "message": "", "started_s": time.time(), **fields}
        self._write()

    def update(self, **fields: Any) -> None:
        self._fields.update(fields)
        self._write()

    def end(self, message: str) -> None:
        """`message` says what went wrong, "" if nothing did."""
        self._fields = {"state": "stopped", "message": message, "pid": None}
        self._write()

    def troubles(self, found: list[dict[str, Any]]) -> None:
        if found != self._fields.get("troubles", []):
            self.update(troubles=found)

    def _write(self) -> None:
        try:
            replace_file(self._path, json.dumps(self._fields).encode())
        except OSError as error:
            # The disk is full. The caller keeps the box's processes alive and must not end because of that.
            log.warning("%s could not be written: %s", self._path, error)


def read_end(path: Path) -> str:
    """Why a box that does not run now ended, if not in order; "" if nothing is known of it."""
    try:
        fields = json.loads(path.read_text())
        state, message = str(fields.get("state", "stopped")), str(fields.get("message") or "")
    except (OSError, json.JSONDecodeError, AttributeError):
        return ""
    if state == "failed":
        return f"it did not start: {message}"
    if state == "stopped":
        return f"it ended: {message}" if message else ""
    return f"it was killed while {state}"


def read_troubles(path: Path) -> list[dict[str, Any]]:
    """Troubles of the processes that the main process supervises; the controller reads them for `status`."""
    try:
        return list(json.loads(path.read_text()).get("troubles", []))
    except (OSError, json.JSONDecodeError):
        return []
