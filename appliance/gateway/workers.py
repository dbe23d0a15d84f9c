"""Keeps the workers of a gateway running: several processes on one port. One that ends is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable

import orjson

from runtime.processes.kernel import die_with_parent

log = logging.getLogger("appliance.gateway")

EXIT_USAGE = 2
_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
_RESTART_S = 0.5


def keep_workers(count: int, work: Callable[[int], int]) -> int:
    """Until SIGTERM or SIGINT, or until one cannot begin. Returns the exit status.

    Args:
        count: of workers.
        work: what the worker of this number does, in its own process; returns its exit status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pids = {_fork(work, index): index for index in range(count)}
    stopping, status = False, 0
    while pids:
        number = signal.sigwait(_SIGNALS)
        if number != signal.SIGCHLD:
            stopping = True
            _stop(pids)
        for pid, index in list(pids.items()):
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del pids[pid]
            code = os.waitstatus_to_exitcode(raw)
            if code in (1, EXIT_USAGE) and not stopping:
                stopping, status = True, 1
                _stop(pids)
            elif not stopping:
                log.error("worker %d ended with %d, starting another", index, code)
                time.sleep(_RESTART_S)
                pids[_fork(work, index)] = index
    return status


def _stop(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


def _fork(work: Callable[[int], int], index: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(parent)
    os._exit(work(index))


class Siblings:
    """Datagrams by which each worker reports to all others what keys spend there. Create before the workers are forked.
    A datagram is lost, and costs its key nothing, where a reader is too far behind."""

    def __init__(self, count: int) -> None:
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for end in (end for pair in self._pairs for end in pair):
            end.setblocking(False)

    def tell(self, own: int, key: str, batch: bool, requests: int, tokens: int) -> None:
        """Report what a key has spent. own: the number of the reporting worker."""
        message = orjson.dumps((key, batch, requests, tokens))
        for index, (_, sender) in enumerate(self._pairs):
            if index != own:
                with contextlib.suppress(OSError):
                    sender.send(message)

    def listen(self, own: int, heard: Callable[[str, bool, int, int], None]) -> None:
        """Call `heard` on the running loop with each report of another worker. own: the number of this one."""
        reader = self._pairs[own][0]
        asyncio.get_running_loop().add_reader(reader, lambda: heard(*orjson.loads(reader.recv(1024))))
