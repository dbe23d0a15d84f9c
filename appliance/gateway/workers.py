"""Runs several workers of a gateway, processes on one port, and reports between them what keys spend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

import orjson

from runtime.processes.kernel import die_with_parent

log = logging.getLogger("appliance.gateway")


def keep_workers(count: int, work: Callable[[int], int]) -> int:
    """Fork workers and wait for all of them. SIGTERM, SIGINT or the end of one of them ends them all.

    Args:
        count: of workers.
        work: what the worker of this number does, in its own process; returns its exit status.

    Returns:
        The exit status: 0 if they ended as asked.
    """
    signals, parent, pids = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}, os.getpid(), set[int]()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for index in range(count):
        pid = os.fork()
        if not pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            die_with_parent(parent)
            os._exit(work(index))
        pids.add(pid)
    asked = signal.sigwait(signals) != signal.SIGCHLD
    if not asked:
        log.error("a worker has ended, ending the others")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(not asked or any(codes))


class Siblings:
    """Datagrams by which each worker reports to all others what keys spend there. Create before the workers are forked.
    A datagram is lost, and costs its key nothing, where a reader is too far behind."""

    def __init__(self, count: int) -> None:
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for end in (end for pair in self._pairs for end in pair):
            end.setblocking(False)

    def send(self, own: int, key: str, batch: bool, requests: int, tokens: int) -> None:
        """Report what a key has spent. own: the number of the reporting worker."""
        message = orjson.dumps((key, batch, requests, tokens))
        for index, (_, sender) in enumerate(self._pairs):
            if index != own:
                with contextlib.suppress(OSError):
                    sender.send(message)

    def listen(self, own: int, receive: Callable[[str, bool, int, int], None]) -> None:
        """Call `receive` on the running loop with each report of another worker. own: the number of this one."""
        reader = self._pairs[own][0]
        asyncio.get_running_loop().add_reader(reader, lambda: receive(*orjson.loads(reader.recv(1024))))
