"""Forks the engine's core and its workers, and notices how each ends, at once and in every phase of a start.

vLLM reports that a core is dead, not why. It waits ten minutes for a core that dies between its first message and
vLLM's own monitor, and for ever for a worker that dies during a call of all workers. So each of these processes is
followed by a thread of its parent from its fork on; the first cause of a death is left in a file for the frontend.
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from runtime.processes import numa
from runtime.processes.ended import how_it_ended, status_of
from runtime.processes.kernel import die_with_parent
from serve.core.errors import BY_NAME, CoreDied, CoreKilled, EngineStartFailed, ServeError

log = logging.getLogger(__name__)

WORKER_DIED = 70
"""Exit code of a core one of whose workers died."""
CAUSE_WITHIN_S = 2.0
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}
_children: list[Followed] = []


class Followed(ForkProcess):
    """A process whose parent calls `died` on a thread with its exit status, unless it ended it itself or it ended
    without a fault. numa_nodes: of each worker's device, where it runs (vLLM's --numa-bind starts processes through
    numactl, but these are forked)."""

    _ended = False

    def __init__(self, died: Died, numa_nodes: Sequence[int | None], **named: Any):
        super().__init__(**named)
        self._died, self._numa_nodes = died, numa_nodes
        self._rank = named.get("kwargs", {}).get("local_rank", 0)

    def start(self) -> None:
        super().start()
        self.follower = threading.Thread(target=self._follow, daemon=True, name=f"end of {self.name}")
        self.follower.start()
        _children.append(self)

    def run(self) -> None:
        _children.clear()
        # A process learns that its child ended by a pipe that the child's own children hold too: workers that outlive
        # their core would hide its end.
        die_with_parent()
        numa.bind(self._numa_nodes[self._rank :][:1])
        with leaving_word():
            super().run()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, which is so a moment before it can be reaped."""
        return bool(wait([self.sentinel], 0))

    def terminate(self) -> None:
        self._ended = self._ended or not self.is_over
        super().terminate()

    def kill(self) -> None:
        self._ended = self._ended or not self.is_over
        super().kill()

    def _follow(self) -> None:
        wait([self.sentinel])
        status = status_of(self)
        if status and not self._ended:
            self._died(self, status)


Died = Callable[[Followed, int], None]


def forking(died: Died, numa_nodes: Sequence[int | None] = ()) -> Callable[[], ForkContext]:
    """Stands in for vLLM's get_mp_context."""
    context = ForkContext()
    context.Process = functools.partial(Followed, died, numa_nodes)  # type: ignore[misc, assignment]
    return lambda: context


class CoreDeath:
    """In the frontend. Reports the core's end to `on_death`, on a thread, unless the frontend ends it."""

    def __init__(self, on_death: Callable[[ServeError], None]):
        self._on_death = on_death
        self._cause: ServeError | None = None
        self._known = threading.Event()

    def cause(self) -> ServeError | None:
        """Why the core ended, for whoever hears from vLLM that it has; None if it has not, or was ended in order."""
        self._known.wait(CAUSE_WITHIN_S)
        return self._cause

    def died(self, core: Followed, status: int) -> None:
        self._cause = _left() or _death("its core", status)
        self._known.set()
        self._on_death(self._cause)


def end_with_worker(worker: Followed, status: int) -> None:
    """In the core, which ends with any of its workers: the others would wait for it."""
    cause = _death(f"its worker {worker.name}", status)
    leave_word(cause)
    log.error("%s; the core ends too: the others would wait for it", cause)
    logging.shutdown()
    os._exit(WORKER_DIED)


@contextlib.contextmanager
def leaving_word() -> Iterator[None]:
    """Keep the error with which a core or worker ends. vLLM reports any as "Engine core initialization failed"."""
    try:
        yield
    except Exception as error:
        # vLLM has read that a worker ended, and not how: its follower ends this process once it knows.
        for child in _children:
            if child.is_over:
                child.follower.join(CAUSE_WITHIN_S)
        leave_word(EngineStartFailed(f"{type(error).__name__}: {error}"))
        raise


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
