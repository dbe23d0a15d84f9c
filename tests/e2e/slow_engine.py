"""An engine each of whose steps takes a hundredth of a second while it answers several: they last seconds on a machine
however quick, and leave their client the time to ask another question meanwhile."""

from __future__ import annotations

import functools
import time
from typing import Any

from runtime.processes.lifeline import Lifeline
from serve.engine import main as engine

ENTRY = "tests.e2e.slow_engine:main"
STEP_S = 0.01


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    from vllm.v1.worker.cpu_worker import CPUWorker

    execute = CPUWorker.execute_model

    @functools.wraps(execute)
    def slowly(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if len(scheduled.num_scheduled_tokens) > 1:
            time.sleep(STEP_S)
        return execute(self, scheduled, *args, **kwargs)

    setattr(CPUWorker, "execute_model", slowly)  # noqa: B010 - a method is not assigned to, says mypy
    return engine.main(lifeline, args)
