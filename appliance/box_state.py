"""`box.json`: what the main process tells the commands about itself. Written only by the main process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class BoxState:
    """Fields: pid, url, controller_socket, state (starting|ready|stopping|stopped|failed|killed), message,
    started_s (Unix time)."""

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
        """`message`: what was not as it should be, "" if all was."""
        self._fields = {"state": "stopped", "message": message, "pid": None}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".new")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(self._fields, file)
        os.replace(temporary, self._path)
