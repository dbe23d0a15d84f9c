"""Profiles some steps of a running rank on demand: where their time went, and a trace file.

Only the asked rank is measured, so no other rank has to agree; all of them wait for it while it writes. What goes wrong
is said, and costs the profile, never the job.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from train.control.progress import Events, Progress

log = logging.getLogger(__name__)

MOST_STEPS = 50
LIMIT_S = 60.0  # a step later it ends with the steps that it has
MOST_EVENTS = 400_000  # of one trace: some 100 MB before it is compressed, and as many seconds x 10^-5 to write
SHOWN = 20
INPUT = "input"


class Profiling:
    """Of one rank. collectives: what torch calls the library of its collectives, as it stands in the names of what it
    does. folder: where trace files go."""

    def __init__(self, folder: Path, collectives: str, emit: Events, progress: Progress):
        self._folder, self._collectives, self._emit, self._progress = folder, collectives, emit, progress
        self._profiler: Any = None
        self._left = self._done = 0
        self._began_s = 0.0

    def before_step(self, asked: int) -> None:
        """asked: for so many steps it is wanted from here on, 0: not."""
        if asked and self._profiler is None:
            try:
                # Both of the host and of the device, where there is one.
                self._profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
                self._profiler.start()
            except Exception as error:  # noqa: BLE001 - said to whoever asked; the job goes on without a profile
                self._failed(error)
                return
            self._left, self._done, self._began_s = min(asked, MOST_STEPS), 0, time.perf_counter()

    def after_step(self, step: int) -> None:
        """A step is done."""
        if self._profiler is None:
            return
        self._done += 1
        self._left -= 1
        if self._left <= 0 or time.perf_counter() - self._began_s > LIMIT_S:
            self.end(step)

    def reading_input(self) -> AbstractContextManager[Any]:
        """Around what prepares the input of a step."""
        return nullcontext() if self._profiler is None else torch.profiler.record_function(INPUT)

    def end(self, step: int) -> None:
        """Tell what was measured, if anything is; also where the job's last step is done."""
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
        """The devices are wanted, or the run ends in between: nobody waits for a trace."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._stop_quietly(profiler)
            text = f"The profile of this job ended after {self._done} steps, because the job stops here; ask again."
            self._emit("message", level="warn", text=text)

    def _stop_quietly(self, profiler: Any) -> None:
        try:
            profiler.stop()
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("the profiler did not stop", exc_info=error)

    def _write(self, profiler: Any, step: int) -> tuple[str | None, int]:
        """The newest trace of the job, in place of the one before; none where it would be too long."""
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


def shares(events: Any, seconds: float, collectives: str) -> dict[str, Any]:
    """{"share": seconds by compute, communication, input and idle; "operators": the SHOWN longest, each {"name",
    "kind", "seconds", "count"}}.

    On a device its own time counts, on the host that of the thread which steps. idle: what is left of `seconds`: on a
    device it waits, on the host that thread is in no operator (Python, or it waits for another rank).
    """
    on_device = [one for one in events if one.device_type != torch.autograd.DeviceType.CPU]
    stepping = max(_by_thread(events).items(), key=lambda item: item[1], default=(0, 0.0))[0]
    measured = on_device or [one for one in events if one.thread == stepping or _collective(one.name, collectives)]
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for one in measured:
        micros = one.device_time_total if on_device else one.self_cpu_time_total
        spent[one.name] += micros / 1e6
        count[one.name] += 1
    if on_device:
        spent[INPUT] += sum(one.cpu_time_total for one in events if one.name == INPUT) / 1e6
    share = {"compute": 0.0, "communication": 0.0, "input": 0.0}
    for name, took in spent.items():
        share[_kind(name, collectives)] += took
    share["idle"] = max(0.0, seconds - sum(share.values()))
    longest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    operators = [
        {"name": name[:120], "kind": _kind(name, collectives), "seconds": spent[name], "count": count[name]}
        for name in longest
    ]
    return {"share": share, "operators": operators}


def _by_thread(events: Any) -> dict[int, float]:
    spent: dict[int, float] = defaultdict(float)
    for one in events:
        if one.device_type == torch.autograd.DeviceType.CPU and not one.is_async:
            spent[one.thread] += one.self_cpu_time_total
    return spent


def _kind(name: str, collectives: str) -> str:
    return "input" if name == INPUT else "communication" if _collective(name, collectives) else "compute"


def _collective(name: str, collectives: str) -> bool:
    return name.startswith(("c10d::", "record_param_comms", f"{collectives}:", collectives))
