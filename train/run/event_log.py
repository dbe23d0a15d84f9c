"""A run's events on disk as well as on the leash: what happens while no controller listens is read in afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "events.jsonl"


class EventLog:
    """Appends each event as a line to `<run_dir>/events.jsonl`, then passes it on. One writer: rank 0."""

    def __init__(self, run_dir: str | Path, emit: Callable[..., None]):
        self._file = open(Path(run_dir) / FILE, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the run
        self._emit = emit

    def __call__(self, event: str, **data: Any) -> None:
        self._file.write(json.dumps({"event": event, **data}) + "\n")
        self._emit(event, **data)


def read_events(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The events of all worlds of a run, in the order they were written; none when it never ran.

    A last line that a kill cut short is left out.
    """
    path = Path(run_dir) / FILE
    if not path.exists():
        return
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
