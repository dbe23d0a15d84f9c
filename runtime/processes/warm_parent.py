"""A warm parent imports a heavy library once and then forks processes that already have it; `NodeAgent` keeps them.

    python -m runtime.processes.warm_parent SOCKET MODULE LOG

A supervisor connects to the socket and sends one frame
`{"entry": "module:function", "args": {...}, "env": {...}, "numa_nodes": [...], "log_path": ..., "name": ...}`. The
parent forks; the child keeps that connection as its lifeline (runtime.processes.lifeline) and calls `function(lifeline,
args)`.

Rules
- The parent runs no OpenMP work and never initialises CUDA: neither survives a fork.
- It closes every file of a device's driver that imports opened: forks would inherit them.
- It stays single-threaded: a lock that another thread holds at the fork would stay locked in the child for ever.
- `gc.freeze()` after the imports keeps the collector from touching, and thereby copying, the shared pages.

When a child has ended, the parent writes `{"ended": STATUS}`, its exit status (negative for a signal, as in
subprocess), as the last frame of the child's lifeline, and closes it.
"""

from __future__ import annotations

import asyncio
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
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from runtime.background_tasks import BackgroundTasks
from runtime.devices import kind, kinds
from runtime.errors import ChannelClosed, WarmParentError
from runtime.logs import adopt_libraries, configure_logging, tail
from runtime.network import private_socket
from runtime.processes.kernel import bind_near, die_with_parent, how_it_ended
from runtime.processes.lifeline import Lifeline, encode

log = logging.getLogger(__name__)

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Signals reset to their defaults: a library that prints the native stack first would delay death by five seconds."""
# glibc reads these when a warm parent starts.
# hugetlb: ranks allocate and free hundreds of MB in every step; huge pages cut the cost of page faults to a fifth.
# arena_max: one arena lets the thread that loads a version reuse memory freed by a staging thread, which halves the
# pause. x86_non_temporal_threshold: copies of more than 2 MiB bypass the cache, at twice the rate.
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.arena_max": 1,
    "glibc.cpu.x86_non_temporal_threshold": 2 * 2**20,
}
POLL_S = 0.05
WARM_ENV = (("GLIBC_TUNABLES", ":".join(f"{name}={value}" for name, value in _TUNABLES.items())),)


def main(argv: list[str] | None = None) -> int:
    """argv: the Unix socket to listen on (mode 0600), the module whose import makes the children warm, and the file for
    this process's own output."""
    socket_path, preload, log_path = argv or sys.argv[1:]
    die_with_parent()
    # No core dumps: if a library aborts an engine or rank, as NCCL's watchdog does, a dump would hold gigabytes of
    # prompts and weights, and the process would hold its devices until it is written.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _redirect_output(log_path)
    configure_logging("warm parent")
    gc.disable()  # the collector would repeatedly walk all imported objects and free nothing
    importlib.import_module(preload)
    kinds.before_fork()
    for crash in CRASHES:
        signal.signal(crash, signal.SIG_DFL)
    adopt_libraries()
    gc.collect()
    gc.freeze()
    gc.enable()

    # Bind under a temporary name and rename after listen, so that a client that sees the path can connect.
    unborn = f"{socket_path}.unborn"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unborn)
    listener = private_socket(unborn)
    listener.listen(64)
    os.rename(unborn, socket_path)
    log.info("warm: %s imported, listening on %s", preload, socket_path)
    channel, message = _accept_loop(listener)
    listener.close()
    _run_child(channel, message)


def _accept_loop(listener: socket.socket) -> tuple[Connection, dict[str, Any]]:
    """Forks for each request. Returns the request in the child; the parent exits at SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if SIGCHLD is ignored, as below Ray, no exit status can be read
    clients: set[Connection] = set()  # connections that have not sent a request yet
    children: dict[int, tuple[int, Connection]] = {}  # pidfd -> (pid, lifeline)
    ended: dict[Connection, int] = {}  # lifeline -> exit status, until the lifeline accepts it
    while True:
        readable, writable, _ = select.select([listener, *clients, *children], [*ended], [])
        for channel in writable:
            with channel, contextlib.suppress(OSError):
                channel.send_bytes(encode({"ended": ended.pop(channel)}))
        for pidfd in children.keys() & readable:
            pid, channel = children.pop(pidfd)
            os.close(pidfd)
            ended[channel] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if listener in readable:
            clients.add(Connection(listener.accept()[0].detach()))
        for channel in clients.intersection(readable):
            clients.remove(channel)
            try:
                message = json.loads(channel.recv_bytes())
                pid = os.fork()
            except (EOFError, ValueError, OSError) as error:
                log.warning("no fork: %r", error)
                channel.close()
                continue
            if pid == 0:
                for pidfd in children:
                    os.close(pidfd)
                for other in (*clients, *ended, *(lifeline for _, lifeline in children.values())):
                    other.close()  # an inherited end would hide the other child's death
                return channel, message
            children[os.pidfd_open(pid)] = pid, channel


def _run_child(channel: Connection, message: dict[str, Any]) -> NoReturn:
    # The child does not die with the warm parent: its lifeline ties it to its supervisor, and a dead warm parent is
    # restarted while engines and ranks continue.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(message["env"])
    _redirect_output(message["log_path"])
    configure_logging(message["name"])  # until the entry configures logging
    # Bind before the first thread starts: threads and forked processes inherit it.
    cpus = bind_near(message["numa_nodes"])
    if cpus is not None:
        log.info("bound to processors %s, near NUMA node %s", sorted(cpus), sorted(set(message["numa_nodes"])))
    # An open lifeline in a grandchild would hide this process's death from its supervisor.
    os.register_at_fork(after_in_child=channel.close)
    channel.send_bytes(encode({"pid": os.getpid()}))
    code, lifeline = 1, Lifeline(channel)
    try:
        kind.ask_for_instructions()  # processes on a GPU compute on the host too
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


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


@dataclass(frozen=True)
class WarmSpec:
    """One warm parent: `preload` is the module it imports, `socket_path` where it accepts requests."""

    name: str
    preload: str
    socket_path: str
    log_path: str
    env: tuple[tuple[str, str], ...] = WARM_ENV


class NodeAgent:
    """Starts a node's warm parents and restarts those that die; their forked children survive."""

    def __init__(self, warm: list[WarmSpec]):
        self._specs = {spec.name: spec for spec in warm}
        self._background = BackgroundTasks()
        self._tasks: list[asyncio.Task[None]] = []
        # By name: "" once it accepts requests, else how it died during the import; absent during the import.
        self._outcomes: dict[str, str] = {}

    async def start(self) -> None:
        """Start all warm parents and return at once. `wait_warm` waits for one."""
        if not self._tasks:
            run = self._background.keep
            self._tasks = [run(f"warm parent: {name}", partial(self._keep, spec)) for name, spec in self._specs.items()]

    async def wait_warm(self, name: str, timeout_s: float) -> None:
        """Return when the warm parent `name` accepts requests. Raise WarmParentError after `timeout_s` seconds, or as
        soon as it has ended; it is restarted all the same."""
        spec = self._specs[name]
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self._outcomes:
                    await asyncio.sleep(POLL_S)
            how = self._outcomes[name]
        except TimeoutError:
            how = f"is not ready after {timeout_s} s"
        if how:
            log = tail(spec.log_path)
            # Quote the log's last line first, since `status` and hand-overs show only an error's first line.
            last = log.rpartition("\n")[2]
            ends = f"its log {spec.log_path} ends with {last!r}"
            raise WarmParentError(f"warm parent {name}, which imports {spec.preload}, {how}; {ends}:\n{log}")

    async def stop(self) -> None:
        """Stop the warm parents; processes forked from them continue until their supervisors stop them."""
        await self._background.stop()

    async def _keep(self, spec: WarmSpec) -> None:
        """Run a warm parent once. Raises WarmParentError at its end."""
        Path(spec.socket_path).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "runtime.processes.warm_parent",
            *(spec.socket_path, spec.preload, spec.log_path),
            env={**os.environ, **dict(spec.env)},
        )
        dead = asyncio.create_task(process.wait())
        try:
            while not dead.done() and not Path(spec.socket_path).exists():
                await asyncio.wait([dead], timeout=POLL_S)
            if not dead.done():
                self._outcomes[spec.name] = ""
            how = how_it_ended(await asyncio.shield(dead))
            if self._outcomes.get(spec.name) != "":
                self._outcomes[spec.name] = how
            raise WarmParentError(f"warm parent {spec.name} {how}; its log is {spec.log_path}")
        except asyncio.CancelledError:
            if process.returncode is None:
                process.terminate()
            await dead
            raise
        finally:
            if self._outcomes.get(spec.name) == "":
                del self._outcomes[spec.name]


if __name__ == "__main__":
    sys.exit(main())
