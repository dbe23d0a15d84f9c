"""Entry of a rank: a process forked from the warm parent, on the leash of its RankHost.

Calls it answers: `ping` (where the run is; answered by the leash thread, so only a stopped process stays silent)
and `wish` (suspend, cancel or snapshot at the next step boundary).

Events: those of the run, from rank 0; "ready" when the engine stands and "done" with the outcome, from every rank.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from runtime.leash import Leash
from train.engine import init_world
from train.loop import WISHES, Progress, Run, Wishes, prepare
from train.spec import TrainSpec


def main(leash: Leash, args: dict[str, Any]) -> int:
    """`args`: spec (dict), snapshot (path or None), device_kind. RANK and the like stand in the environment."""
    started = time.perf_counter()
    spec = TrainSpec.from_dict(args["spec"])
    wishes, progress = Wishes(), Progress()

    def wish(name: str) -> None:
        if name not in WISHES:
            raise ValueError(f"wish {name!r} is unknown; expected one of {WISHES}")
        setattr(wishes, name, True)

    leash.serve({"ping": progress.report, "wish": wish})
    progress.enter("joining")
    init_world(spec.device_kind, args["collective_timeout_s"])
    joined = time.perf_counter()
    run: Run = prepare(spec, leash.emit, wishes, progress, args["snapshot"])
    # Engine and model live until the process ends: nothing for the collector to find, every pass would cost.
    gc.collect()
    gc.freeze()
    leash.emit("ready", pid=os.getpid(), step=run.step, seconds={"join": joined - started,
               "prepare": time.perf_counter() - joined})  # fmt: skip
    outcome = run.run()
    progress.enter("done", run.step)
    leash.emit("done", **outcome)
    return 0
