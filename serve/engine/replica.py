"""Supervises one forked engine (a replica), without torch.

Runs inside a Ray actor (wrapped in scheduler.ray.effects) or in any asyncio program. The replica requests an engine
process from the node's warm parent, holds the engine's lifeline, and forwards calls. The engine dies with its
supervisor; `wait_dead` reports why an engine died.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from runtime.devices import kinds
from runtime.errors import ChildDied, ChildError, ChildTimeout
from runtime.processes.child import Child
from runtime.processes.kernel import DiesAs, group_dies_as, life
from serve.core.config import EngineConfig
from serve.core.errors import (
    BY_NAME,
    CoreKilled,
    EngineFailed,
    EngineOutOfMemory,
    EngineRefused,
    EngineStartFailed,
    ServeError,
    VersionUnreadable,
    WrongState,
)
from serve.core.spec import ReplicaSpec, remove_segments_of
from serve.engine.start_errors import in_our_words, out_of_memory
from weights.format.errors import IntegrityError, StoreError

log = logging.getLogger(__name__)

ENTRY = "serve.engine.main:main"
_LOADS = ("swap", "sleep", "wake")
"""Calls whose failure leaves unknown weights in the engine."""
PULSE_EVERY_S, SILENT_S = 2.0, 6.0
"""Interval of liveness calls to an engine's core, and the silence after which `status` reports `silent`."""
_OF_THE_MACHINE = {
    kind.__name__ for kind in (OSError, MemoryError, StoreError, IntegrityError, VersionUnreadable, CoreKilled)
}
"""Errors at an engine's start that its settings do not cause."""


class Replica:
    """Start, swap, sleep, wake and stop one engine. Call one operation at a time, but `status` at any time."""

    def __init__(self, warm_socket: str, log_dir: str, config: EngineConfig | None = None):
        self._warm_socket, self._log_dir = warm_socket, Path(log_dir)
        self._config = config or EngineConfig()
        self._child: Child | None = None
        self._spec: ReplicaSpec | None = None
        self._address = ""
        self._state = "dead"
        self._watching: asyncio.Task[None] | None = None
        self._pulsed_s = 0.0  # time of the core's last answer
        self._operations = 0  # number of operations in progress; each has its own time limit
        self._killed, self._load_failed = "", False  # why the supervisor has killed the engine
        self._last: dict[str, Any] | None = None  # the engine's last report for `status`

    async def start(self, spec: ReplicaSpec) -> dict[str, Any]:
        """Fork an engine, load its version from shared memory and return when it serves.

        Returns `{"pid", "seconds": {...}, "fingerprint": {...}}`. Raises EngineStartFailed (with the end of the
        engine's log), WrongState if an engine runs already, WarmParentError.
        """
        if self._child is not None and self._child.alive:
            raise WrongState(f"replica {self._spec.replica_id} runs an engine already (pid {self._child.pid})")
        _remove_leftovers(spec)  # left by a supervisor that was killed with its engine
        began_s = time.perf_counter()
        log_path = self._log_dir / f"engine-{spec.replica_id}.log"
        child = await Child.spawn(
            self._warm_socket,
            ENTRY,
            {"spec": spec.to_json(), "limits": self._config.model_dump()},
            numa_nodes=spec.numa_nodes,
            log_path=log_path,
            name=f"engine {spec.replica_id}",
        )
        self._child, self._spec, self._state = child, spec, "starting"
        self._last = None
        self._killed, self._load_failed = "", False
        group_dies_as(DiesAs.ENGINE, child.pid)  # later forks inherit the setting
        ready = await self._started(child, spec)
        self._state, self._address = "ready", ready["address"]
        self._watching = asyncio.create_task(self._end_if_hung(child), name=f"pulse of {child.name}")
        seconds = {**ready["seconds"], "fork_to_healthy": time.perf_counter() - began_s}
        return {"pid": child.pid, "seconds": seconds, "fingerprint": ready["fingerprint"]}

    async def _started(self, child: Child, spec: ReplicaSpec) -> dict[str, Any]:
        """Wait for the engine's "ready" event. Raises EngineStartFailed once nothing of the engine is left."""
        late = False
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                event = await child.next_event()
                while event is not None and event["event"] not in ("ready", "fatal"):
                    event = await child.next_event()
        except TimeoutError:
            event, late = None, True
        if event is not None and event["event"] == "ready":
            return event
        await child.kill_and_wait()
        _remove_leftovers(spec)
        self._state = "dead"
        if late:
            how = f"was not healthy after {self._config.start_timeout_s} s"
            raise EngineStartFailed(_with_log(f"engine {spec.replica_id} {how}", child))
        raise _start_failed(spec, child, event, child.how_it_ended())

    async def life(self) -> dict[str, Any]:
        """Return runtime.processes.kernel.life of this supervisor; callers also use this call as a liveness check."""
        return life()

    async def swap(self, model: str, version: str, version_path: str) -> dict[str, Any]:
        """Serve another version; requests in flight continue. See serve.engine.control for steps and errors."""
        return await self._call("swap", model=model, version=version, version_path=version_path)

    async def sleep(self) -> dict[str, Any]:
        """Free weights and KV memory without ending the process. Drain the engine first."""
        answer = await self._call("sleep")
        self._state = "asleep"
        group_dies_as(DiesAs.ASLEEP, self._child.pid)
        return answer

    async def wake(self, model: str, version: str, version_path: str) -> dict[str, Any]:
        """Load a version into a sleeping engine and serve it once its fingerprint matches."""
        answer = await self._call("wake", model=model, version=version, version_path=version_path)
        self._state = "ready"
        group_dies_as(DiesAs.ENGINE, self._child.pid)
        return answer

    async def unload_adapter(self, name: str) -> bool:
        """Unload the LoRA adapter `NAME@VERSION` after its requests ended; False if it is not loaded."""
        if self._child is None or not self._child.alive or self._state != "ready":
            return False
        return await self._call("unload_adapter", name=name)

    async def status(self) -> dict[str, Any]:
        """Return EngineControl.status plus `pid`, `devices`, `node`, `settings`, `address` (path of the Unix socket, or
        https://HOST:PORT on another machine), and `silent`: true if the engine does not respond and the rest is its
        last report. State "dead": no engine runs; "starting": the engine does not serve yet."""
        spec, child = self._spec, self._child
        alive = child is not None and child.alive
        own = {
            "pid": child.pid if child is not None and alive else None,
            "devices": list(spec.devices) if spec else [],
            "node": spec.node if spec else "",
            "address": self._address,
            "settings": spec.settings if spec else "",
            "silent": False,
        }
        if not alive or self._state == "starting":  # a starting engine may not answer for over a minute
            of = {"model": spec and spec.model, "version": spec and spec.version}
            state = "starting" if alive else "dead"
            return {"state": state, **of, "rss_bytes": 0, "running": 0, "waiting": 0, **own}
        silent = not self._operations and time.monotonic() - self._pulsed_s >= SILENT_S
        if self._last is not None and silent:
            return {**self._last, "silent": True}
        self._last = {**await self._call("status"), **own}
        return self._last

    async def _end_if_hung(self, child: Child) -> None:
        """Kill an engine whose core is silent for `hung_s`. A core answers between steps and when asleep."""
        while True:
            self._pulsed_s = time.monotonic()
            await asyncio.sleep(PULSE_EVERY_S)
            try:
                await child.call("pulse", timeout_s=self._config.hung_s)
            except ChildTimeout:
                if not self._operations:
                    return self._kill(child, f"it hung: no answer for {self._config.hung_s:.0f} s")
            except ChildDied:
                return
            except ChildError:
                pass  # an error counts as an answer; if its core died, the engine ends itself

    def _kill(self, child: Child, why: str) -> None:
        self._killed = why
        log.error("engine %s is killed: %s", self._spec.replica_id, why)
        child.kill()

    async def stop(self) -> None:
        """End the engine and all processes that it started; does nothing without an engine."""
        if self._child is not None:
            if self._child.alive:
                await self._child.stop(self._config.stop_timeout_s)
            await self._child.kill_and_wait()
            _remove_leftovers(self._spec)
        self._state = "dead"

    async def wait_dead(self) -> dict[str, Any]:
        """Return when the engine process is dead: `{"exit": reason, "log": end of the log, "starved": whether memory
        ran out, "load_failed": whether the supervisor killed the engine after a failed swap, sleep or wake}`."""
        if self._child is None:
            raise WrongState("no engine was started")
        await self._child.closed()
        await self._child.kill_and_wait()
        self._state = "dead"
        _remove_leftovers(self._spec)
        if self._child.starved:
            reason = "it was killed because the host's memory ran out"
        elif self._killed:
            reason = self._killed
        elif self._child.fatal:
            reason = _cause(self._child.fatal)
        else:
            reason = f"its process {self._child.how_it_ended()}"
        return {
            "exit": reason,
            "log": self._child.log_end(),
            "starved": self._child.starved,
            "load_failed": self._load_failed,
        }

    async def _call(self, method: str, **args: Any) -> dict[str, Any]:
        if self._child is None:
            raise WrongState(f"{method}: no engine was started")
        operation = method != "status"
        self._operations += operation
        try:
            return await self._child.call(method, timeout_s=self._config.swap_timeout_s, **args)
        except ChildError as error:
            kind = BY_NAME.get(error.type, ServeError)
            if issubclass(kind, EngineFailed) and self._child.alive and method in _LOADS:
                self._load_failed = True
                self._kill(self._child, f"{method} failed: {error.message}")
            raise kind(
                error.message if error.type in BY_NAME else f"{method}: {error.type}: {error.message}"
            ) from error
        except ChildDied as error:
            failed = EngineOutOfMemory if error.starved else EngineFailed
            raise failed(f"{method}: {error}") from error
        except ChildTimeout as error:
            if method in _LOADS:  # the engine's weights are then undefined
                self._load_failed = True
                self._kill(self._child, f"{method}: {error}")
            raise EngineFailed(f"{method}: {error}") from error
        finally:
            self._operations -= operation


def _start_failed(spec: ReplicaSpec, child: Child, fatal: dict[str, Any] | None, ended: str) -> ServeError:
    """The error of a failed start. fatal: the engine's "fatal" event, if any. ended: completes "its process …"."""
    if child.starved:
        return EngineOutOfMemory("the engine was killed while it started, because the host's memory ran out")
    message = fatal["message"] if fatal else child.log_end()
    words = in_our_words(message, spec.model)
    refused = fatal and not (
        not _OF_THE_MACHINE.isdisjoint(fatal["kinds"])
        or kinds.at_fault(fatal["type"], fatal["message"])
        or kinds.not_ready(fatal["message"])
    )
    failed = EngineRefused if refused else EngineStartFailed
    cause = _cause(fatal) if fatal else f"its process {ended}"
    if words is not None:
        failed = EngineOutOfMemory if out_of_memory(message) else failed
        return failed(f"{words}\n{cause}; its log {child.log_path} says more")
    return failed(_with_log(f"engine {spec.replica_id} ended during start: {cause}", child))


def _cause(fatal: dict[str, Any]) -> str:
    """The message of a "fatal" event. Our own errors are sentences; other errors need their type too."""
    return fatal["message"] if fatal["type"] in BY_NAME else f"{fatal['type']}: {fatal['message']}"


def _with_log(problem: str, child: Child) -> str:
    """Append the end of the log. People see the first line of an error; the rest is for the box's log."""
    return f"{problem}; its log is {child.log_path}\n{child.log_end()}"


def _remove_leftovers(spec: ReplicaSpec) -> None:
    """Remove a dead engine's socket, scratch directory and segments."""
    Path(spec.socket_path).unlink(missing_ok=True)
    shutil.rmtree(spec.scratch_path, ignore_errors=True)
    remove_segments_of(spec.socket_path)
