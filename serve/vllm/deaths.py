"""Ends an engine's core when a worker dies, and reports why a core ended. vLLM reports only that the core ended.

The first cause is written to a file in the engine's scratch directory: the error that vLLM logs when the core or a
worker fails, or how a worker died. Without the file, the core's exit status is the cause.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm.v1.executor import multiproc_executor

from runtime.processes.kernel import how_it_ended
from serve.core.errors import BY_NAME, CoreKilled, EngineStartFailed, ServeError

log = logging.getLogger(__name__)

OUT_OF_STEP = 70
"""Exit code of a worker, or of the core, if a worker has failed and another worker would wait for it for ever."""
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_FATAL = ("EngineCore failed", "EngineCore encountered a fatal error", "WorkerProc failed")
REAPED_WITHIN_S = 2.0
LATE_REPLY_S = 10.0
"""Time for the other workers to reply after one has failed."""
NOTICED_WITHIN_S = 0.2
"""Longest time between the closing of a dead worker's pipes."""


def watch() -> None:
    """Record the causes of deaths. Call it before the core is forked."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_witness)  # vLLM reconfigures logging, which removes handlers but not filters


def _witness(record: logging.LogRecord) -> bool:
    error = record.exc_info and record.exc_info[1]
    if error and str(record.msg).startswith(_FATAL):
        _leave(EngineStartFailed(f"{type(error).__name__}: {error}"))
    return True


def cause(core: BaseProcess | None) -> ServeError:
    """Return why this core ended. core: the dead process, None if unknown."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # no file, or its writer was killed
        kind, message = json.loads(_note().read_text())
        return BY_NAME[kind](message)
    if core is not None:
        core.join(REAPED_WITHIN_S)  # its death is visible shortly before its exit status
    return CoreKilled("its core ended") if core is None or not core.exitcode else _death("its core", core.exitcode)


def core_of_failed_start(error: BaseException) -> BaseProcess | None:
    """The core that this error of vLLM's front end is about. Only a stack frame of vLLM still refers to it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (launch := frame.f_locals.get("launch")) is not None and launch.engine_manager is not None:
            return launch.engine_manager.processes[0]
    return None


def _leave(cause: ServeError) -> None:
    """Write the cause of the death, unless an earlier cause is written."""
    with contextlib.suppress(FileExistsError), open(_note(), "x") as note:
        json.dump([type(cause).__name__, str(cause)], note)


def _note() -> Path:
    return Path(tempfile.gettempdir()) / "failure"


def _death(process: str, status: int) -> ServeError:
    kind = CoreKilled if status in _FROM_OUTSIDE else EngineStartFailed
    return kind(f"{process} {how_it_ended(status)}")


class ShmExecutor(multiproc_executor.MultiprocExecutor):
    """vLLM's executor in the engine's core; also ends the core with a worker and reads all replies of a call."""

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        """End the core if a worker has died: the other workers may wait for the dead worker in a collective for ever,
        and the core for their replies. vLLM calls this method to end its workers, also after a death."""
        over = wait([worker.sentinel for worker in worker_procs], NOTICED_WITHIN_S)
        for worker in worker_procs:
            if worker.sentinel not in over:
                continue
            worker.join()  # its death is visible shortly before its exit status
            if worker.exitcode:
                death = _death(f"its worker {worker.name}", worker.exitcode)
                _leave(death)
                log.error("%s; the core ends too: other workers would wait for it", death)
                logging.shutdown()
                os._exit(OUT_OF_STEP)
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
        """Call all workers and read all replies. vLLM 0.32 raises at the first failed reply without reading the other
        replies, and later calls then read these as their own (vllm#57846)."""
        if non_block or unique_reply_rank is not None:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, unique_reply_rank, **aggregators)
        call = super().collective_rpc(method, timeout, args, kwargs, True, **aggregators)
        call.get_response = functools.partial(_replies, self.response_mqs, method, timeout)
        return call.result()


def _replies(queues: Sequence[Any], method: Any, timeout_s: float | None) -> list[Any]:
    """Return one reply per worker. Raises RuntimeError with the first failure, or TimeoutError. Ends the engine if a
    worker does not reply after another worker failed, since it may wait in a collective for ever."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    replies: list[Any] = []
    failed: RuntimeError | None = None
    for queue in queues:
        try:
            status, result = queue.dequeue(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
        except TimeoutError as error:
            if failed is None:
                raise TimeoutError(f"RPC call to {method} timed out.") from error
            log.error("a worker does not reply after another worker has failed in %s: %s", method, failed)
            logging.shutdown()
            os._exit(OUT_OF_STEP)
        replies.append(result)
        if status != multiproc_executor.WorkerProc.ResponseStatus.SUCCESS and failed is None:
            failed = RuntimeError(f"Worker failed with error '{result}'; the stack trace is in the engine's log")
            until_s = min(filter(None, (until_s, time.monotonic() + LATE_REPLY_S)))
    if failed is not None:
        raise failed
    return replies
