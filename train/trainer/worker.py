"""Runs a rank: a process forked from the warm parent, on the lifeline of its RankHost.

Calls it answers: `ping` (where the run is; answered by the lifeline thread, so only a stopped process stays silent)
and `signal` (suspend, after the micro-batch or the step).

Events: those of the run, from rank 0; "ready" when the engine exists and "done" with the outcome, from every rank.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from runtime.logs import configure_logging
from runtime.processes.lifeline import Lifeline
from train.control.progress import ControlSignals, Progress
from train.plan.spec import TrainSpec
from train.trainer.engine import init_world, meeting_url
from train.trainer.prepare import hold_base, prepare


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """`args`: spec (dict), rank, world_size, snapshot (path or None), meeting (path of the file where the world meets).
    What else torch.distributed needs stands in the environment."""
    started = time.perf_counter()
    spec = TrainSpec.from_dict(args["spec"])
    configure_logging("rank", job_id=spec.job_id, rank=args["rank"])
    signals, progress = ControlSignals(), Progress()
    lifeline.serve({"ping": progress.report, "signal": signals.ask})
    progress.enter("joining")
    meeting = meeting_url(args["meeting"], args["rank"], args["world_size"])
    init_world(spec.device_kind, meeting)
    joined = time.perf_counter()
    _base = hold_base(spec)
    run = prepare(spec, lifeline.emit, signals, progress, args["snapshot"])
    # Engine and model live until the process ends: nothing for the collector to find, every pass would cost.
    gc.collect()
    gc.freeze()
    seconds = {"join": joined - started, "prepare": time.perf_counter() - joined}
    lifeline.emit("ready", pid=os.getpid(), step=run.step, seconds=seconds)
    outcome = run.run()
    progress.enter("done", run.step)
    run.close()
    seconds = {**outcome.pop("seconds", {}), "leave": time.monotonic() - run.boundary_s}
    lifeline.emit("done", seconds=seconds, **outcome)
    return 0
