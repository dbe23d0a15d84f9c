"""`box.json`: what the main process tells the commands about itself. Only the main process writes it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from runtime.replace_file import replace_file

log = logging.getLogger(__name__)


class BoxState:
    """Fields: pid, url, controller_socket, state (starting|ready|stopping|stopped|failed|killed), message,
    started_s (Unix time), first_key_file (of a box that had no key), troubles (of the supervised processes, in the form
    of `BackgroundTasks.degraded`)."""

    def __init__(self, path: Path):
        self._path = path
        self.fields: dict[str, Any] = {}

    def update(self, **fields: Any) -> None:
        if (changed := {**self.fields, **fields}) == self.fields:
            return
        self.fields = changed
        try:
            replace_file(self._path, json.dumps(self.fields).encode())
        except OSError as error:
            # The disk is full. The caller keeps the box's processes alive and must not end because of that.
            log.warning("%s could not be written: %s", self._path, error)


def read_troubles(path: Path) -> list[dict[str, Any]]:
    """Troubles of the processes that the main process supervises; the controller reads them for `status`."""
    try:
        return list(json.loads(path.read_text()).get("troubles", []))
    except (OSError, json.JSONDecodeError):
        return []
