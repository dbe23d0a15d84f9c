"""An engine whose second tensor-parallel worker fails in one of its steps, as for want of memory."""

from __future__ import annotations

import functools
from typing import Any

from runtime.processes.lifeline import Lifeline
from serve.engine import main as engine

GOOD_STEPS = 20


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    from vllm.v1.worker.cpu_worker import CPUWorker

    execute, done = CPUWorker.execute_model, list[None]()

    @functools.wraps(execute)
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.append(None)
        if self.rank == 1 and len(done) > GOOD_STEPS:
            raise RuntimeError("no memory on the second device")
        return execute(self, *args, **kwargs)

    setattr(CPUWorker, "execute_model", fails)  # noqa: B010 - a method is not assigned to, says mypy
    return engine.main(lifeline, args)
