"""The executor of a tensor-parallel engine, given by `--distributed-executor-backend`: vLLM's, which ends the engine's
core with a worker that dies, and leaves no reply of a failed call in its queues."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.v1.executor import multiproc_executor

from runtime.processes.ended import status_of
from serve.vllm.deaths import OUT_OF_STEP, end_core

log = logging.getLogger(__name__)

LATE_REPLY_S = 10.0
"""How long the other workers have to reply once one has failed."""
NOTICED_WITHIN_S = 0.2
"""Between the ends of a dead worker's pipes."""


class ShmExecutor(multiproc_executor.MultiprocExecutor):
    """In the engine's core."""

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        """vLLM calls it to end its workers, also once one of them has died: the others may wait for that one in a
        collective, and the core for their replies, for ever."""
        over = wait([worker.sentinel for worker in worker_procs], NOTICED_WITHIN_S)
        for worker in worker_procs:
            if worker.sentinel in over and (status := status_of(worker)):
                end_core(worker.name, status)
        multiproc_executor.MultiprocExecutor._ensure_worker_termination(worker_procs)

    def collective_rpc(  # type: ignore[override]
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **aggregators: Any,
    ) -> Any:
        """A call that fails on several workers raises at the first reply in vLLM 0.32, and the other replies stay in
        their queues: each later call takes them for its own (vllm#57846)."""
        if non_block or unique_reply_rank is not None:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, unique_reply_rank, **aggregators)
        asked = super().collective_rpc(method, timeout, args, kwargs, True, **aggregators)
        asked.get_response = functools.partial(_replies, self.response_mqs, method, timeout)
        return asked.result()


def _replies(queues: Sequence[Any], method: Any, timeout_s: float | None) -> list[Any]:
    """One reply of each worker. Raises RuntimeError with the first failure, TimeoutError. Ends the engine if a worker
    is silent while another has failed: it may be waiting for that one in a collective for ever."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    found: list[Any] = []
    failed: RuntimeError | None = None
    for queue in queues:
        try:
            status, result = queue.dequeue(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
        except TimeoutError as error:
            if failed is None:
                raise TimeoutError(f"RPC call to {method} timed out.") from error
            log.error("a worker is silent after another one has failed in %s: %s", method, failed)
            logging.shutdown()
            os._exit(OUT_OF_STEP)
        found.append(result)
        if status != multiproc_executor.WorkerProc.ResponseStatus.SUCCESS and failed is None:
            failed = RuntimeError(f"Worker failed with error '{result}'; the stack trace is in the engine's log")
            until_s = min(filter(None, (until_s, time.monotonic() + LATE_REPLY_S)))
    if failed is not None:
        raise failed
    return found
