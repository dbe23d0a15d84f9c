"""Starts the gateway process: `python -m appliance.gateway.main --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import orjson
import uvloop

from appliance.gateway.core.config import GatewayConfig
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.gateway import BusClient, Gateway
from appliance.ui.site import site
from runtime.logs import configure_logging, timestamp
from runtime.network.sockets import check_free, private_socket
from runtime.processes import garbage
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as

log = logging.getLogger("appliance.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit status: 0 stopped as asked, 1 failed, 2 bad settings.

    Each worker prints one line {"event": "listening", "host", "port", …} on stdout once it accepts connections.
    """
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway.main", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="a resolved GatewayConfig, JSON")
    arguments = parser.parse_args(argv)
    configure_logging("gateway")
    dies_as(DiesAs.GATEWAY)
    data = orjson.loads(arguments.config.read_bytes())
    try:
        config = GatewayConfig.from_mapping(data)
        site()  # compressing its files takes 20 ms, which no stream shall wait for
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each client may need a connection to an engine
        private = None
        if config.private_socket is not None:
            # For all workers: those that the kernel does not wake find it empty.
            Path(config.private_socket).unlink(missing_ok=True)
            private = private_socket(config.private_socket)
            private.listen(2048)
            private.setblocking(False)
        if config.workers == 1:
            return _run(config, private)
        check_free(config.host, config.port)
        return keep_workers(config.workers, partial(_run, config, private, Siblings(config.workers)))
    except ConfigInvalid as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", config.host, config.port, error.strerror or error)
        return 1


def _run(config: GatewayConfig, private: socket.socket | None, siblings: Siblings | None = None, index: int = 0) -> int:
    """One worker. siblings: it is the one of this number of several."""
    if siblings is not None:
        log_path = None if config.log_path is None else f"{config.log_path}.{index}"
        config = dataclasses.replace(config, name=f"{config.name}-{index}", log_path=log_path)
    uvloop.run(_serve(config, private, siblings, index))
    return 0


async def _serve(config: GatewayConfig, private: socket.socket | None, siblings: Siblings | None, index: int) -> None:
    """From first listen to last response."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    spending = gateway.state.spending
    if siblings is not None:
        spending.report_spent = partial(siblings.send, index)
        siblings.listen(index, spending.spent_elsewhere)
    gateway.state.background.keep("bus", BusClient(gateway).run)
    garbage.settle()
    port = await gateway.listen(config.host, config.port, reuse_port=siblings is not None, private=private)
    line = {"time": timestamp(time.time()), "level": "info", "process": "gateway", "event": "listening"}
    # One write: workers share this pipe, and `print` may write a line and its end separately.
    os.write(1, orjson.dumps({**line, "host": config.host, "port": port}, option=orjson.OPT_APPEND_NEWLINE))
    await stop.wait()
    log.info("stopping: %d connections", len(gateway.state.connections))
    await gateway.stop(config.shutdown_s)


# -- several workers, processes on one port


def keep_workers(count: int, work: Callable[[int], int]) -> int:
    """Fork workers and wait for all of them. SIGTERM, SIGINT or the end of one of them ends them all.

    Args:
        count: of workers.
        work: what the worker of this number does, in its own process; returns its exit status.

    Returns:
        The exit status: 0 if they ended as asked.
    """
    parent, pids, codes = os.getpid(), set[int](), list[int]()
    for index in range(count):
        pid = os.fork()
        if not pid:
            die_with_parent(parent)
            os._exit(work(index))
        pids.add(pid)

    def stop(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            log.error("a worker has ended with status %d, ending the others", codes[-1])
        stop()
    return int(any(codes))


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


if __name__ == "__main__":
    sys.exit(main())
