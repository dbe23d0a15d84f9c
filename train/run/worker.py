"""Runs a rank: a process forked from the warm parent, on the lifeline of its RankHost.

Calls it answers: `ping` (where the run is; answered by the lifeline thread, so only a stopped process stays silent),
`signal` (suspend or cancel, by leaving the step or at its end; snapshot at its end), `answer` (to a question of the
run), `profile` (how many steps, see train.run.profiling) and, when parked, `resume` (from this snapshot).

Events: those of the run, from rank 0; "ready" when the engine exists and "done" with the outcome, from every rank. A
rank whose "done" says `parked` has freed its memory (train.state.parking) and waits for `resume`; otherwise it ends.
"""

from __future__ import annotations

import gc
import os
import time
from queue import SimpleQueue
from typing import Any

from runtime.logs import configure_logging
from runtime.processes.lifeline import Lifeline
from train.control.progress import ControlSignals, Progress
from train.plan.spec import TrainSpec
from train.run.engine import init_world, meeting_url
from train.run.loop import Run
from train.run.prepare import continued, hold_base, prepare, refuse_unsafe


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """`args`: spec (dict), rank, world_size, snapshot (path or None), meeting (path of the file where the world meets),
    collective_timeout_s. What else torch.distributed needs stands in the environment."""
    started = time.perf_counter()
    spec = TrainSpec.from_dict(args["spec"])
    configure_logging("rank", job_id=spec.job_id, rank=args["rank"])
    signals, progress = ControlSignals(), Progress()
    resumes: SimpleQueue[str] = SimpleQueue()

    def resume(snapshot: str) -> None:
        resumes.put(snapshot)

    lifeline.serve(
        {
            "ping": progress.report,
            "signal": signals.ask,
            "answer": signals.answer,
            "profile": signals.profile,
            "resume": resume,
        }
    )
    progress.enter("joining")
    meeting = meeting_url(args["meeting"], args["rank"], args["world_size"])
    init_world(spec.device_kind, meeting, args["collective_timeout_s"])
    joined = time.perf_counter()
    _base = hold_base(spec)
    refuse_unsafe(spec)
    run: Run = prepare(spec, lifeline.emit, signals, progress, args["snapshot"])
    # Engine and model live until the process ends: nothing for the collector to find, every pass would cost.
    gc.collect()
    gc.freeze()
    seconds = {"join": joined - started, "prepare": time.perf_counter() - joined}
    while True:
        lifeline.emit("ready", pid=os.getpid(), step=run.step, seconds=seconds)
        outcome = run.run()
        progress.enter("done", run.step)
        parked = outcome.get("parked", False)
        if parked:
            signals.clear()
        else:
            run.close()
        seconds = {**outcome.pop("seconds", {}), "leave": time.monotonic() - run.boundary_s}
        lifeline.emit("done", seconds=seconds, **outcome)
        if not parked:
            return 0
        run.close()
        snapshot = resumes.get()
        began = time.perf_counter()
        run = continued(run, snapshot)
        seconds = {"join": 0.0, "prepare": time.perf_counter() - began}
