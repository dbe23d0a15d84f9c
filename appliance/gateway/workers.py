"""Keeps the workers of a gateway running: several processes on one port. One that ends is replaced, and so is one that
lives and does nothing.

The kernel gives each worker its part of the new connections, whether it takes them or not, and a hand-over waits until
every worker has applied the table. Whoever asks the port whether the gateway lives is answered by another one: with one
of four stopped, every fourth client waited for ever, and nobody noticed.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
from collections.abc import Callable

log = logging.getLogger("appliance.gateway")

EXIT_USAGE = 2
BEAT_S, LOOK_S = 1.0, 2.0
HUNG_S = 120.0
"""Longer than any pause that a process recovers from by itself, such as half a minute of SIGSTOP or of swapping."""
LONGEST_HUNG_S = 8 * HUNG_S
"""What is started in place of one that was killed gets twice its time, up to this, until it is at work."""
_RESTART_S = 0.5


class Beats:
    """When each worker was last at work (monotonic clock), in memory that it shares with its parent."""

    def __init__(self, count: int) -> None:
        self._seen = memoryview(mmap.mmap(-1, 8 * count)).cast("d")

    def beat(self, index: int) -> None:
        self._seen[index] = time.monotonic()

    def seen_s(self, index: int) -> float:
        return self._seen[index]


class Workers:
    """start: forks the worker of this number and returns its pid; the child unblocks SIGCHLD and beats every BEAT_S."""

    def __init__(
        self, start: Callable[[int], int], count: int, beats: Beats, *, hung_s: float = HUNG_S, look_s: float = LOOK_S
    ) -> None:
        self._start, self._count, self._beats = start, count, beats
        self._hung_s, self._look_s = hung_s, look_s
        self._pids: dict[int, int] = {}  # pid -> number
        self._begun_s = [0.0] * count
        self._patience_s = [hung_s] * count
        self._looked_s = time.monotonic()
        self._stopping = self._failed = False

    def keep(self) -> int:
        """Until SIGTERM or SIGINT, or until one cannot begin. Returns the exit status."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGHUP, lambda number, _: self._tell(number))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        for index in range(self._count):
            self._begin(index)
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._pids:
                self._ended(self._pids.pop(pid), os.waitstatus_to_exitcode(status))
            elif not pid:
                self._look()
                signal.sigtimedwait({signal.SIGCHLD}, self._look_s)
        return 1 if self._failed else 0

    def _begin(self, index: int) -> None:
        self._beats.beat(index)
        self._begun_s[index] = self._beats.seen_s(index)
        self._pids[self._start(index)] = index

    def _ended(self, index: int, code: int) -> None:
        if self._stopping:
            return
        if code in (1, EXIT_USAGE):
            self._failed = True
            self._stop()
            return
        log.error("worker %d ended with %d, starting another", index, code)
        time.sleep(_RESTART_S)
        if not self._stopping:
            self._begin(index)

    def _look(self) -> None:
        now_s = time.monotonic()
        asleep_s, self._looked_s = now_s - self._looked_s, now_s
        if asleep_s > self._hung_s / 2:  # this process was stopped itself, most likely with all of them
            for index in self._pids.values():
                self._beats.beat(index)
            return
        for pid, index in self._pids.items():
            seen_s = self._beats.seen_s(index)
            if seen_s > self._begun_s[index]:
                self._patience_s[index] = self._hung_s
            if now_s - seen_s > (patience_s := self._patience_s[index]) and not self._stopping:
                log.error("worker %d lives and has done nothing for %.0f s: it is killed", index, patience_s)
                self._patience_s[index] = min(2 * patience_s, max(self._hung_s, LONGEST_HUNG_S))
                self._beats.beat(index)  # it is killed once
                self._begun_s[index] = self._beats.seen_s(index)
                os.kill(pid, signal.SIGKILL)

    def _stop(self) -> None:
        self._stopping = True
        self._tell(signal.SIGTERM)

    def _tell(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)
