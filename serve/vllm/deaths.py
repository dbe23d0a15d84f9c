"""Notices how the engine's core and its workers end, at once and in every phase of a start.

vLLM reports that a core is dead, not why. It waits for ten minutes for one that dies between its first message and
vLLM's own monitor, and for ever for a worker that dies during a call of all workers. `CoreDeath` is in the frontend,
`follow_workers` in the core. Both are threads that begin once the last process is forked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from runtime.processes.ended import how_it_ended, status_of
from serve.core.errors import BY_NAME, CoreDied, CoreKilled, EngineStartFailed, ServeError

log = logging.getLogger(__name__)

WORKER_DIED = 70
"""Exit code of a core one of whose workers died."""
CAUSE_WITHIN_S = 2.0
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}


class _Handle(Protocol):
    """vLLM's UnreadyWorkerProcHandle."""

    proc: Any
    death_writer: Any


class CoreDeath:
    """Follows the core from its fork on. Tells `on_death` of its end, on a thread, unless the frontend ends it."""

    def __init__(self, on_death: Callable[[ServeError], None]):
        self._on_death = on_death
        self._cause: ServeError | None = None
        self._known, self._ordered = threading.Event(), False

    def follow(self, manager: Any) -> None:
        """manager: the class of vLLM's that forks the core, CoreEngineProcManager."""
        constructor, shutdown = manager.__init__, manager.shutdown

        @functools.wraps(constructor)
        def construct(made: Any, *args: Any, **kwargs: Any) -> None:
            constructor(made, *args, **kwargs)
            threading.Thread(target=self._wait, args=(made.processes,), daemon=True, name="death of the core").start()

        @functools.wraps(shutdown)
        def end(made: Any, *args: Any, **kwargs: Any) -> None:
            self._ordered = self._ordered or not wait(made.sentinels(), 0)
            shutdown(made, *args, **kwargs)

        manager.__init__, manager.shutdown = construct, end

    def cause(self) -> ServeError | None:
        """Why the core ended, for whoever hears from vLLM that it has; None if it has not, or was ended in order."""
        self._known.wait(CAUSE_WITHIN_S)
        return self._cause

    def _wait(self, processes: Sequence[Any]) -> None:
        died = wait([process.sentinel for process in processes])
        if not self._ordered:
            process = next(process for process in processes if process.sentinel in died)
            self._cause = _left() or _death("its core", status_of(process))
            self._known.set()
            self._on_death(self._cause)


def follow_workers(wait_for_ready: Callable[..., Any]) -> Callable[..., Any]:
    """wait_for_ready: vLLM's WorkerProc.wait_for_ready, which the core calls once it has forked every worker."""

    @functools.wraps(wait_for_ready)
    def run(handles: Sequence[_Handle]) -> Any:
        follower = threading.Thread(target=_end_with, args=(handles,), daemon=True, name="death of a worker")
        follower.start()
        try:
            return wait_for_ready(handles)
        except Exception:
            # It has read that a worker ended, and not how: the follower ends this process once it knows.
            follower.join(CAUSE_WITHIN_S)
            raise

    return run


def _end_with(workers: Sequence[_Handle]) -> None:
    died = wait([worker.proc.sentinel for worker in workers])
    if any(worker.death_writer.closed for worker in workers):
        return  # the executor ends them
    process = next(worker.proc for worker in workers if worker.proc.sentinel in died)
    cause = _death(f"its worker {process.name}", status_of(process))
    leave_word(cause)
    log.error("%s; the core ends too: the others would wait for it", cause)
    logging.shutdown()
    os._exit(WORKER_DIED)


def leaves_word(constructor: Callable[..., None]) -> Callable[..., None]:
    """Keep the error with which a core or worker does not start. vLLM reports any as "Engine core initialization
    failed"."""

    @functools.wraps(constructor)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            constructor(*args, **kwargs)
        except Exception as error:
            leave_word(EngineStartFailed(f"{type(error).__name__}: {error}"))
            raise

    return run


def leave_word(cause: ServeError) -> None:
    """The first one stays."""
    with contextlib.suppress(FileExistsError), open(_note(), "x") as note:
        json.dump([type(cause).__name__, str(cause)], note)


def _left() -> ServeError | None:
    try:
        kind, message = json.loads(_note().read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # a process killed while it wrote
        return None
    return BY_NAME[kind](message)


def _note() -> Path:
    return Path(tempfile.gettempdir()) / "failure"


def _death(process: str, status: int) -> ServeError:
    kind = CoreKilled if status in _FROM_OUTSIDE else CoreDied
    return kind(f"{process} {how_it_ended(status)}")
