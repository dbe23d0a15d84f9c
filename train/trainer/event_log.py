"""Writes a run's events to disk as well as to the lifeline, so that a controller can read those it missed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = "events.jsonl"
MOST_WAITING_BYTES = 1 << 20


class EventLog:
    """Appends each event as a line to `<run_dir>/events.jsonl`, then passes it on. One writer: rank 0. A full disk
    stops no step: lines wait for space, the rest of a partly written line first. Once MOST_WAITING_BYTES wait, further
    lines are passed on and not written."""

    def __init__(self, run_dir: str | Path, emit: Callable[..., None]):
        self._file = open(Path(run_dir) / FILE, "a+b", buffering=0)  # noqa: SIM115 - as long as the run
        # A line truncated by a kill must not merge with the next.
        self._waiting = bytearray(b"" if _ends_whole(self._file) else b"\n")
        self._full = False
        self._emit = emit

    def __call__(self, event: str, **data: Any) -> None:
        line = json.dumps({"event": event, **data}).encode() + b"\n"
        if len(self._waiting) + len(line) <= MOST_WAITING_BYTES:
            self._waiting += line
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self._full = False
        except OSError as error:
            if not self._full:
                log.warning("events wait, %s cannot be written: %s", self._file.name, error.strerror)
            self._full = True
        self._emit(event, **data)


def _ends_whole(file: Any) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_events(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The events of all worlds of a run, in the order they were written; none when it never ran.

    It skips lines truncated by a kill or a full disk.
    """
    path = Path(run_dir) / FILE
    if not path.exists():
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("line %d of %s is truncated and skipped", number, path)
                continue
            if isinstance(event, dict) and "event" in event:
                yield event
