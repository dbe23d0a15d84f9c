"""Says why an engine's core ended. vLLM reports that it did, and not why.

The first cause is left in a file of the engine's scratch directory: the error that vLLM logs when the core or a worker
fails, or how a worker died. Of a core that left none the exit status tells.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from runtime.processes.ended import how_it_ended
from serve.core.errors import BY_NAME, CoreDied, CoreKilled, EngineStartFailed, ServeError

log = logging.getLogger(__name__)

OUT_OF_STEP = 70
"""Exit code of a worker, or of the core, where a worker has failed and another one would wait for it for ever."""
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_FATAL = ("EngineCore failed", "EngineCore encountered a fatal error", "WorkerProc failed")
REAPED_WITHIN_S = 2.0


def watch() -> None:
    """Call it before the core is forked."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_witness)  # vLLM configures logging again, which removes handlers


def _witness(record: logging.LogRecord) -> bool:
    error = record.exc_info and record.exc_info[1]
    if error and str(record.msg).startswith(_FATAL):
        _leave(EngineStartFailed(f"{type(error).__name__}: {error}"))
    return True


def end_core(worker: str, status: int) -> NoReturn:
    """End this core, one of whose workers has died with that exit status."""
    cause = _death(f"its worker {worker}", status)
    _leave(cause)
    log.error("%s; the core ends too: the others would wait for it", cause)
    logging.shutdown()
    os._exit(OUT_OF_STEP)


def cause(core: BaseProcess | None) -> ServeError:
    """Why this core, which is dead, has ended; None: a core whose process is not known."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # a process killed while it wrote
        kind, message = json.loads(_note().read_text())
        return BY_NAME[kind](message)
    if core is not None:
        core.join(REAPED_WITHIN_S)  # its end is seen a moment before it can be reaped
    return CoreKilled("its core ended") if core is None or not core.exitcode else _death("its core", core.exitcode)


def core_of_failed_start(error: BaseException) -> BaseProcess | None:
    """The core that this error of vLLM's front end is about. Only a frame of vLLM's has it by then."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (launch := frame.f_locals.get("launch")) is not None and launch.engine_manager is not None:
            return launch.engine_manager.processes[0]
    return None


def _leave(cause: ServeError) -> None:
    """The first one stays."""
    with contextlib.suppress(FileExistsError), open(_note(), "x") as note:
        json.dump([type(cause).__name__, str(cause)], note)


def _note() -> Path:
    return Path(tempfile.gettempdir()) / "failure"


def _death(process: str, status: int) -> ServeError:
    kind = CoreKilled if status in _FROM_OUTSIDE else CoreDied
    return kind(f"{process} {how_it_ended(status)}")
