"""Profiles some steps of a running rank on demand: where their time went, and a trace file.

Only the asked rank is measured, so no other rank has to agree; all of them wait for it while it writes. An error is
reported and costs the profile, never the job.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from runtime.profile_shares import INPUT, LIMIT_S, MOST_EVENTS, MOST_ROWS, MOST_STEPS, shares
from train.control.progress import Events, Progress

log = logging.getLogger(__name__)


class Profiling:
    """Profiles one rank. collectives: the name of the collectives' library in the names of torch's operations. folder:
    where trace files go. rows: how many this rank has in each step. At most MOST_ROWS are profiled: of a longer step
    the last ones, with the optimizer step."""

    def __init__(self, folder: Path, collectives: str, emit: Events, progress: Progress, rows: int = 1):
        self._folder, self._collectives, self._emit, self._progress = folder, collectives, emit, progress
        self._rows = rows
        self._profiler: Any = None
        self._left = self._done = 0
        self._until = 0  # rows to wait for before it begins
        self._began_s = 0.0

    def before_step(self, asked: int) -> None:
        """asked: the number of steps from here on for which it is wanted, 0: none."""
        if asked and self._profiler is None:
            self._left, self._done = min(asked, MOST_STEPS, max(1, MOST_ROWS // self._rows)), 0
            self._until = max(0, self._rows - MOST_ROWS)
            if not self._until:
                self._begin()

    def after_row(self) -> None:
        """A row of a step is done."""
        if self._until:
            self._until -= 1
            if not self._until:
                self._begin()

    def _begin(self) -> None:
        try:
            # The host's activities, and the device's where there is one.
            self._profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._profiler.start()
        except Exception as error:  # noqa: BLE001 - said to whoever asked; the job goes on without a profile
            self._failed(error)
            return
        self._began_s = time.perf_counter()

    def after_step(self, step: int) -> None:
        """A step is done."""
        if self._profiler is None:
            return
        self._done += 1
        self._left -= 1
        if self._left <= 0 or time.perf_counter() - self._began_s > LIMIT_S:
            self.end(step)

    def reading_input(self) -> AbstractContextManager[Any]:
        """Return a context for the code that prepares the input of a step."""
        return nullcontext() if self._profiler is None else torch.profiler.record_function(INPUT)

    def end(self, step: int) -> None:
        """Report what was measured, if anything was; also called when the job's last step is done."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        seconds, where = time.perf_counter() - self._began_s, self._progress.phase
        self._progress.enter("profiling")
        try:
            profiler.stop()
            found = shares(profiler.events(), seconds, self._collectives)
            trace, nbytes = self._write(profiler, step)
            self._emit("profiled", step=step, steps=self._done, seconds=seconds, trace=trace, bytes=nbytes, **found)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
        self._progress.enter(where)

    def drop(self) -> None:
        """End without a trace, because the devices are wanted or the run ends."""
        profiler, self._profiler = self._profiler, None
        awaited, self._until = self._until, 0
        if profiler is not None:
            try:
                profiler.stop()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("the profiler did not stop", exc_info=error)
        if profiler is not None or awaited:
            text = f"The profile of this job ended after {self._done} steps, because the job stops here; ask again."
            self._emit("message", level="warn", text=text)

    def _write(self, profiler: Any, step: int) -> tuple[str | None, int]:
        """Write the trace in place of the job's last one; returns path and size, (None, 0) if it would be too long."""
        for left in self._folder.glob("trace-*.json.gz"):
            left.unlink()
        if len(profiler.events()) > MOST_EVENTS:
            return None, 0
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"trace-{step}.json.gz"
        profiler.export_chrome_trace(str(path))
        return str(path), path.stat().st_size

    def _failed(self, error: Exception) -> None:
        log.warning("no profile", exc_info=error)
        self._profiler = None
        self._emit("message", level="warn", text=f"The job could not be profiled and goes on: {repr(error)[:300]}")
