"""An engine with a process that dies in a phase of its start, set by `dies.json` in its shared-memory root.

In the phases "entry", "arguments" and "application" the frontend dies; in phases of workers the second worker of a
tensor-parallel engine; in all others the core. In the phase STEPS the second worker raises an error in a step, as if
out of memory.
"""

import functools
import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from runtime.processes.lifeline import Lifeline
from serve.engine import main as engine

ENTRY = "tests.e2e.dying_engine:main"
FRONTEND = ("entry", "arguments", "application")
WORKER = {
    "loads": "load_model",
    "measures memory": "determine_available_memory",
    "makes the cache": "initialize_from_config",
    "warms up": "compile_or_warm_up_model",
}
CORE = ("fingerprint", "while the application is built")
PHASES = (*FRONTEND, *WORKER, *CORE)
STEPS, GOOD_STEPS = "steps", 20
PLAN, DIED_AT = "dies.json", "died.at"


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    root = Path(args["spec"]["shm_root"])
    plan = json.loads((root / PLAN).read_text())
    phase, by, rank = plan["phase"], plan["by"], plan["rank"]

    def die(pid: int | None = None) -> None:
        (root / DIED_AT).write_text(str(time.monotonic()))
        if by.isdigit() and pid is None:
            os._exit(int(by))
        os.kill(pid or os.getpid(), signal.SIGKILL if by.isdigit() else signal.Signals[by])

    def dies_in(owner: Any, name: str, end: Any = die) -> None:
        before = getattr(owner, name)

        @functools.wraps(before)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(args[0] if args else None, "rank", rank) == rank:
                end()
            return before(*args, **kwargs)

        setattr(owner, name, run)

    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.cpu_worker import CPUWorker

    from serve.vllm.cpu_worker import ShmCPUWorker

    if phase == "entry":
        die()
    elif phase == "arguments":
        dies_in(engine, "engine_arguments")
    elif phase == "application":
        dies_in(engine, "build_app")
    elif phase in WORKER:
        dies_in(ShmCPUWorker, WORKER[phase])
    elif phase == STEPS:
        steps = itertools.count()

        def fail() -> None:
            if next(steps) >= GOOD_STEPS:
                raise RuntimeError("no memory on the second device")

        dies_in(CPUWorker, "execute_model", fail)  # below our own worker class, which ends the engine
    elif phase == "fingerprint":
        dies_in(EngineCoreProc, "preprocess_add_request")
    else:
        dies_in(engine, "build_app", lambda: die(multiprocessing.active_children()[0].pid))
    return engine.main(lifeline, args)
