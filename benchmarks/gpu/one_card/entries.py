"""Entry points for forked ranks and engines that share a GPU."""

from __future__ import annotations

import functools
import os
from typing import Any


def rank(lifeline: Any, args: dict[str, Any]) -> int:
    os.environ["NCCL_HOSTID"] = f"rank-{args['rank']}"
    from train.trainer import worker

    if args["spec"]["job_id"] == "stopped":
        worker.init_world = functools.partial(worker.init_world, timeout_s=8.0)
    return worker.main(lifeline, args)


def engine(lifeline: Any, args: dict[str, Any]) -> int:
    """Run a tensor-parallel engine with all workers on the first card."""
    from vllm.v1.executor import multiproc_executor

    from serve.engine import main as served

    os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0")
    begin = multiproc_executor.WorkerProc.worker_main

    @functools.wraps(begin)
    def on_the_first(*positional: Any, **named: Any) -> Any:
        os.environ["NCCL_HOSTID"] = f"worker-{named['rank']}"
        named["local_rank"] = 0
        return begin(*positional, **named)

    multiproc_executor.WorkerProc.worker_main = staticmethod(on_the_first)
    return served.main(lifeline, args)
