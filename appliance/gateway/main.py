"""Starts the gateway process: `python -m appliance.gateway.main --config-json PATH_OR_JSON`."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

import orjson
import uvloop

from appliance.gateway import FORM
from appliance.gateway.bus import BusClient
from appliance.gateway.core.config import GatewayConfig, load_config
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.gateway import Gateway
from runtime.logs import configure_logging, timestamp
from runtime.processes.oom import DiesAs, dies_as
from runtime.sockets import check_free

log = logging.getLogger("appliance.gateway")

EXIT_USAGE = 2
_PR_SET_PDEATHSIG = 1
_WORKER_RESTART_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit status: 0 stopped as asked, 1 failed, 2 bad settings.

    Prints one line {"event": "listening", "host", "port", …} on stdout for each address it starts to accept on.
    """
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway.main", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="PATH_OR_JSON", help="a resolved GatewayConfig")
    arguments = parser.parse_args(argv)
    configure_logging("gateway")
    dies_as(DiesAs.GATEWAY)
    log.info("the gateway's hot modules are %s", FORM)
    try:
        config = load_config(arguments.config_json)
        _raise_file_limit(config.limits.max_connections)
        if config.workers == 1:
            return _run(config, reuse_port=False)
        try:
            check_free(config.host, config.port)
        except OSError as error:
            return _cannot_listen(config, error)
        return _supervise(config)
    except ConfigInvalid as error:
        log.error("%s", error)
        return EXIT_USAGE


def _run(config: GatewayConfig, *, reuse_port: bool) -> int:
    try:
        return uvloop.run(serve(config, reuse_port=reuse_port))
    except OSError as error:
        return _cannot_listen(config, error)


def _cannot_listen(config: GatewayConfig, error: OSError) -> int:
    log.error("cannot listen on %s:%d: %s", config.host, config.port, error.strerror or error)
    return 1


async def serve(config: GatewayConfig, *, reuse_port: bool = False) -> int:
    """One worker, from first listen to last response."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload)
    keyed = asyncio.Event()
    bus = BusClient(gateway, on_table=lambda: keyed.set() if gateway.state.keys else None)
    bus_task = gateway.state.background.keep("bus", bus.run)
    # Imported objects live as long as the process: without this each full garbage collection walks all of them while
    # every stream waits. Requests form no lasting cycles, so collections may be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    port = await gateway.listen(config.host if config.is_loopback else "127.0.0.1", config.port, reuse_port=reuse_port)
    _announce(config.host if config.is_loopback else "127.0.0.1", port)
    waiting = [loop.create_task(stop.wait())]
    if not config.is_loopback:
        # Listen on the network only once a key exists.
        waiting.append(loop.create_task(keyed.wait()))
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await gateway.close_listeners()
            await gateway.listen(config.host, port, reuse_port=reuse_port)
            _announce(config.host, port)
    await stop.wait()
    log.info("stopping: %d connections", len(gateway.state.connections))
    await gateway.stop(config.shutdown_s)
    bus.send()
    for task in (bus_task, *waiting):
        task.cancel()
    await asyncio.gather(bus_task, *waiting, return_exceptions=True)
    return 0


def _announce(host: str, port: int) -> None:
    # One write: workers share this pipe, and `print` may write a line and its end separately.
    line = {
        "time": timestamp(time.time()),
        "level": "info",
        "process": "gateway",
        "event": "listening",
        "host": host,
        "port": port,
    }
    os.write(sys.stdout.fileno(), orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _supervise(config: GatewayConfig) -> int:
    """Several workers on one port (SO_REUSEPORT); one that dies is replaced."""
    workers: dict[int, int] = {}
    stopping = False

    def stop(number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in workers:
            os.kill(pid, signal.SIGTERM)

    def reload(number: int, _frame: object) -> None:
        for pid in workers:
            os.kill(pid, number)

    signal.signal(signal.SIGHUP, reload)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for index in range(config.workers):
        workers[_fork_worker(config, index)] = index
    failed = False
    while workers:
        pid, status = os.wait()
        if pid not in workers:
            continue
        index = workers.pop(pid)
        if stopping:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code in (1, EXIT_USAGE):
            failed = True
            stop(signal.SIGTERM, None)
        else:
            log.error("worker %d ended with %d, starting another", index, code)
            time.sleep(_WORKER_RESTART_S)
            if not stopping:
                workers[_fork_worker(config, index)] = index
    return 1 if failed else 0


def _fork_worker(config: GatewayConfig, index: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until its loop listens to it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before, and the kernel would tell nobody
        os._exit(1)
    own = dataclasses.replace(
        config,
        name=f"{config.name}-{index}",
        log_path=None if config.log_path is None else f"{config.log_path}.{index}",
    )
    os._exit(_run(own, reuse_port=True))


def _raise_file_limit(connections: int) -> None:
    """Each client may need its own upstream connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 512
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
