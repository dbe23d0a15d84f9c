"""Starts the gateway process: `python -m appliance.gateway.main --config-json PATH_OR_JSON`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import orjson
import uvloop

from appliance.gateway.bus import BusClient
from appliance.gateway.core.config import GatewayConfig, load_config
from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.gateway import Gateway
from appliance.gateway.workers import BEAT_S, EXIT_USAGE, Beats, Workers
from appliance.ui.site import site
from runtime.logs import configure_logging, timestamp
from runtime.network.sockets import check_free
from runtime.processes import garbage
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as

log = logging.getLogger("appliance.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT. Returns the exit status: 0 stopped as asked, 1 failed, 2 bad settings.

    Prints one line {"event": "listening", "host", "port", …} on stdout for each address it starts to accept on.
    """
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway.main", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="PATH_OR_JSON", help="a resolved GatewayConfig")
    arguments = parser.parse_args(argv)
    configure_logging("gateway")
    dies_as(DiesAs.GATEWAY)
    try:
        config = load_config(arguments.config_json)
        site()  # compressing its files takes 20 ms, which no stream shall wait for
        _raise_file_limit(config.limits.max_connections)
        if config.workers == 1:
            return _run(config, reuse_port=False)
        try:
            check_free(config.host, config.port)
        except OSError as error:
            return _cannot_listen(config, error)
        beats = Beats(config.workers)
        return Workers(partial(_fork_worker, config, beats), config.workers, beats).keep()
    except ConfigInvalid as error:
        log.error("%s", error)
        return EXIT_USAGE


def _run(config: GatewayConfig, *, reuse_port: bool, beat: Callable[[], None] | None = None) -> int:
    try:
        return uvloop.run(serve(config, reuse_port=reuse_port, beat=beat))
    except OSError as error:
        return _cannot_listen(config, error)


def _cannot_listen(config: GatewayConfig, error: OSError) -> int:
    log.error("cannot listen on %s:%d: %s", config.host, config.port, error.strerror or error)
    return 1


async def serve(config: GatewayConfig, *, reuse_port: bool = False, beat: Callable[[], None] | None = None) -> int:
    """One worker, from first listen to last response. beat: to be called for as long as it is at work."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload)
    keyed = asyncio.Event()
    bus = BusClient(gateway, on_table=lambda: keyed.set() if gateway.state.keys else None)
    bus_task = gateway.state.background.keep("bus", bus.run)
    beating = None if beat is None else gateway.state.background.keep("beat", partial(_beat, beat))
    garbage.settle()
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
    ending = [bus_task, *waiting, *([beating] if beating is not None else [])]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
    return 0


async def _beat(beat: Callable[[], None]) -> None:
    while True:
        beat()
        await asyncio.sleep(BEAT_S)


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


def _fork_worker(config: GatewayConfig, beats: Beats, index: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until its loop listens to it
    die_with_parent(parent)
    own = dataclasses.replace(
        config,
        name=f"{config.name}-{index}",
        log_path=None if config.log_path is None else f"{config.log_path}.{index}",
    )
    os._exit(_run(own, reuse_port=True, beat=partial(beats.beat, index)))


def _raise_file_limit(connections: int) -> None:
    """Each client may need its own connection to an engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 512
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
