"""Runs a warm parent, which imports a heavy library once and then forks processes that already have it.

    python -m runtime.processes.warm_parent --socket PATH --preload MODULE --log FILE

A supervisor connects to the socket and sends one frame
`{"entry": "module:function", "args": {...}, "env": {...}, "numa_nodes": [...], "log_path": ..., "name": ...}`. The
parent forks; the child keeps that connection as its lifeline (runtime.processes.lifeline) and calls `function(lifeline,
args)`.

Rules
- The parent runs no OpenMP work and never initialises CUDA: neither survives a fork.
- It keeps nothing open of a device's driver, whatever it imported: every fork would inherit it.
- It stays single-threaded: a lock that another thread holds at the fork would stay locked in the child for ever.
- `gc.freeze()` after the imports keeps the collector from touching, and thereby copying, the shared pages.

`{"ended": PID}` in place of a request asks how a child ended, which only its parent knows. The answer is
`{"status": ..., "living": ...}`: its exit status (negative for a signal, as in subprocess), None if it lives or was not
forked here; and whether it lives.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from runtime.devices.kinds import KINDS
from runtime.errors import ChannelClosed
from runtime.logs import adopt_libraries, configure_logging
from runtime.network import private_socket
from runtime.processes.kernel import bind_near, die_with_parent
from runtime.processes.lifeline import Lifeline, encode

log = logging.getLogger(__name__)

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Handled by no library: one that prints the native stack first keeps a dead process alive for five seconds."""
ENDED_KEPT = 256  # exit statuses of the children that ended last
SILENCE_S = 5.0  # that a connection may wait with its request; nothing is forked for others meanwhile
_ended: dict[int, int] = {}
_living: set[int] = set()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="runtime.processes.warm_parent", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket to listen on (mode 0600)")
    parser.add_argument("--preload", required=True, help="module whose import makes the children warm")
    parser.add_argument("--log", required=True, help="file for this process's own output")
    options = parser.parse_args(argv)

    die_with_parent()
    # The kernel would write out the memory of an engine or rank that a library aborts, as NCCL's watchdog does:
    # prompts and weights, gigabytes. Until that is done it holds its devices and seems to hang.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _redirect_output(options.log)
    configure_logging("warm parent")
    gc.disable()  # it would repeatedly walk everything imported so far and find nothing to free
    importlib.import_module(options.preload)
    for kind in KINDS.values():
        kind.before_fork()
    for crash in CRASHES:
        signal.signal(crash, signal.SIG_DFL)
    adopt_libraries()
    gc.collect()
    gc.freeze()
    gc.enable()

    # Bind under another name and rename once it listens, so that a client that sees the path can connect.
    unborn = f"{options.socket}.unborn"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unborn)
    listener = private_socket(unborn)
    listener.listen(64)
    os.rename(unborn, options.socket)
    log.info("warm: %s imported, listening on %s", options.preload, options.socket)
    channel, message = _accept_loop(listener)
    listener.close()
    return _run_child(channel, message)


def _accept_loop(listener: socket.socket) -> tuple[Connection, dict[str, Any]]:
    """Forks for each request. Returns the request in the child; the parent exits at SIGTERM."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        connection, _ = listener.accept()
        with connection:
            if not select.select([connection], [], [], SILENCE_S)[0]:
                log.warning("no fork: a client sent nothing within %s s", SILENCE_S)
                continue
            channel = Connection(connection.detach())
        try:
            message = json.loads(channel.recv_bytes())
            if "ended" in message:
                _reap()
                pid = message["ended"]
                channel.send_bytes(encode({"status": _ended.get(pid), "living": pid in _living}))
            elif pid := os.fork():
                _living.add(pid)
            else:
                return channel, message
        except (EOFError, ValueError, OSError) as error:
            log.warning("no fork: %r", error)
        channel.close()


def _run_child(channel: Connection, message: dict[str, Any]) -> int:
    # The child does not die with the warm parent: its lifeline ties it to its supervisor, and a dead warm parent is
    # restarted while engines and ranks continue.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(message["env"])
    _redirect_output(message["log_path"])
    configure_logging(message["name"])  # until the entry configures it
    # Bind before the first thread starts: threads and forked processes inherit it.
    cpus = bind_near(message["numa_nodes"])
    if cpus is not None:
        log.info("bound to processors %s, near NUMA node %s", sorted(cpus), sorted(set(message["numa_nodes"])))
    # An open lifeline in a grandchild would hide this process's death from its supervisor.
    os.register_at_fork(after_in_child=channel.close)
    channel.send_bytes(encode({"pid": os.getpid()}))
    code, lifeline = 1, Lifeline(channel)
    try:
        for kind in KINDS.values():  # a process that computes on a GPU computes on the host too
            kind.before_computing()
        module, _, function = message["entry"].partition(":")
        code = int(getattr(importlib.import_module(module), function)(lifeline, message["args"]) or 0)
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a process: report, log, exit
        log.exception("%s ends with an error", message["name"])
        with contextlib.suppress(ChannelClosed):
            lifeline.fatal(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # os._exit, because the teardown of a forked torch can hang on threads that exist only in the parent.
        os._exit(code)
    return code


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _living.discard(pid)
        _ended[pid] = os.waitstatus_to_exitcode(status)
        if len(_ended) > ENDED_KEPT:
            del _ended[next(iter(_ended))]


if __name__ == "__main__":
    sys.exit(main())
