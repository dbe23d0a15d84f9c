"""Implements the verbs of `scheduler.handover.effects` with Ray. This module has the verbs on replicas: one named
detached actor per engine, to which the gateways route. groups.py has the verbs on jobs (one actor per device, holding
its rank), nodes.py tracks the nodes (node.py is the actor on each).

Ray places processes, and is never in the data path. Actors are named and outlive the controller, so a restarted
controller finds them again in `observe`; the process on a device proves who holds the device. Only this package of
`scheduler` imports Ray, `serve` and `train`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError

from runtime.errors import SupervisorDied
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.workload import ReplicaView
from scheduler.handover.effects import Box, Detail
from scheduler.ray.actors import (
    LOOK_S,
    REPLICA,
    UNNAMED_TIMEOUT_S,
    Silent,
    Supervisor,
    actor_names,
    errors_as_failures,
    find_actor,
    first_line,
)
from scheduler.ray.groups import Groups, Jobs
from scheduler.ray.node import NodeConfig, stored_bytes
from scheduler.ray.nodes import Nodes
from serve.core.config import EngineConfig
from serve.core.sizing import NotServable
from serve.core.spec import ReplicaSpec
from serve.engine.replica import Replica

log = logging.getLogger(__name__)

STOP_SLACK_S = 15.0  # seconds for a supervisor to end an engine that did not stop in time


class Routing(Protocol):
    """The gateways' routing table of replicas; implemented by the controller's bus."""

    async def open(self, replica_id: str, model: str, version: str, address: str) -> None:
        """Add the replica to the routing table; return when all gateways know it. address: see Replica.status."""

    async def drain(self, replica_id: str) -> None:
        """Send the replica no new requests; returns when every gateway reports no request in flight."""

    async def withhold_adapters(self, replica_id: str) -> None:
        """Send the replica no new requests for LoRA adapters; returns when every gateway has confirmed this."""

    def offer_adapters(self, replica_id: str) -> None:
        """Send the replica requests for adapters again."""

    def version(self, replica_id: str) -> str:
        """The replica's version in the routing table; "" if the replica is not open."""

    def avoid(self, replica_id: str, avoided: bool) -> None:
        """Prefer other replicas of the model, because this replica's engine gives no sign of life; False ends this."""

    def close(self, replica_id: str) -> None:
        """Forget a replica that is gone."""


class Versions(Protocol):
    """The store of model versions."""

    async def in_memory(self, model: str, version: str) -> Path:
        """Return the version's directory in shared memory, read from disk if necessary. It stays there until each call
        has a matching `taken`. Raises LookupError."""

    def taken(self, model: str, version: str) -> None:
        """Release the version, because an engine of the model has loaded and now holds it, or will not load it."""

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        """Return the fields of ReplicaSpec that depend on the model: task, dtype, max_model_len, kv_cache_bytes, ...
        Raises NotServable, and LookupError for a model that is gone."""


@dataclass(slots=True)
class _Engine:
    """The controller's record of an engine. watcher: task that waits for its end. hanging: True if it gives no sign of
    life, so that gateways prefer others. stopping: its end is no failure. died: cause and blame."""

    supervisor: Supervisor
    node_config: NodeConfig | None = None
    rss_bytes: int = 0
    watcher: asyncio.Task[Blame] | None = None
    hanging: bool = False
    stopping: bool = False
    died: tuple[str, Blame] = ("", "own")


class RayEffects(Groups):
    """Implements `scheduler.handover.effects.Effects` in the controller's asyncio loop. Ray must be initialised."""

    def __init__(self, nodes: Nodes, routing: Routing, versions: Versions, jobs: Jobs, engine: EngineConfig):
        self._changed = asyncio.Event()
        super().__init__(nodes, jobs, self._changed.set)
        self._routing, self._versions, self._engine = routing, versions, engine
        self._engines: dict[str, _Engine] = {}

    async def watch(self) -> None:
        """Watch for nodes that join and leave, until cancelled."""
        await self._nodes.watch(self._changed.set)

    async def observe(self) -> Box:
        await self._nodes.look()
        return Box.of(self._nodes.devices, await self.observe_replicas(), await self.observe_groups())

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def stop_everything(self) -> None:
        """End all engines and ranks when the box stops. Remaining processes end with Ray."""
        stops = {f"replica {replica_id}": self.stop_replica(replica_id) for replica_id in self._engines}
        stops |= {f"job {job_id}": self.stop_group(job_id) for job_id in self._groups}
        for holder, failed in zip(stops, await asyncio.gather(*stops.values(), return_exceptions=True), strict=True):
            if isinstance(failed, EffectFailed):
                log.warning("%s was not stopped: %s", holder, failed)
            elif isinstance(failed, BaseException):
                raise failed

    async def start_replica(self, plan: ReplicaView) -> Detail:
        node_config = self._nodes.config_of(plan.devices)
        async with self._version_on_node(plan.model, plan.version, node_config) as path:
            spec = self._replica_spec(plan, node_config, path)
            await self._nodes.wait_warm(node_config, "serve")
            engine = self._find_engine(plan.id)
            if engine is None:
                warm, logs = node_config.warm_socket("serve"), str(node_config.log_dir)
                actor = self._nodes.here(Replica, REPLICA + plan.id, node_config, warm, logs, self._engine)
                engine = self._record_engine(plan.id, actor)
            engine.node_config = node_config
            with errors_as_failures():
                detail = await engine.supervisor.call("start", spec)
        engine.supervisor.reported = True
        self._watch(plan.id, engine)
        # The home node cannot read versions on other nodes.
        home = node_config.name == self._nodes.home.name
        read = await asyncio.to_thread(stored_bytes, Path(spec.version_path)) if home else None
        return {**detail, "bytes": read}

    async def stop_replica(self, replica_id: str) -> Detail:
        self._routing.close(replica_id)
        engine = self._find_engine(replica_id)
        if engine is not None:
            engine.stopping = True
            if engine.watcher is not None:
                engine.watcher.cancel()
            try:
                async with asyncio.timeout(self._engine.stop_timeout_s + STOP_SLACK_S):
                    await engine.supervisor.call("stop")
            except (SupervisorDied, RayError, TimeoutError) as error:
                log.warning("killing the engine: %s", first_line(error), extra={"replica": replica_id})
            engine.supervisor.kill("the replica was stopped")  # its lifeline then kills the rest of the engine
            try:
                async with asyncio.timeout(UNNAMED_TIMEOUT_S):
                    while REPLICA + replica_id in await actor_names():
                        await asyncio.sleep(0.01)
            except TimeoutError as error:
                reason = f"Ray still lists its actor {UNNAMED_TIMEOUT_S:.0f} s after it was killed"
                raise EffectFailed(reason, "outside") from error
        self._engines.pop(replica_id, None)
        return None

    async def open_replica(self, replica_id: str) -> Detail:
        status = await self._call_replica(replica_id, "status")
        if status["state"] != "ready":
            raise EffectFailed(f"the engine is {status['state']}")
        opening = self._routing.open(replica_id, status["model"], status["version"], status["address"])
        await self._while_alive(replica_id, opening, "before it accepted requests")
        return None

    async def drain_replica(self, replica_id: str) -> Detail:
        draining = self._routing.drain(replica_id)
        await self._while_alive(replica_id, draining, "while it finished its requests")
        return None

    async def _while_alive(self, replica_id: str, work: Coroutine[Any, Any, Any], when: str) -> Any:
        """Await and return `work`. Raises EffectFailed as soon as the engine dies."""
        engine, task = self._engines.get(replica_id), asyncio.ensure_future(work)
        watcher = engine and engine.watcher
        try:
            await asyncio.wait({task, *([watcher] if watcher else [])}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            blame = watcher.result() if watcher is not None and not watcher.cancelled() else "outside"
            raise EffectFailed(f"the engine died {when}", blame)
        finally:
            task.cancel()

    async def sleep_replica(self, replica_id: str) -> Detail:
        return await self._call_replica(replica_id, "sleep")

    async def wake_replica(self, replica_id: str, model: str, version: str) -> Detail:
        return await self._load("wake", replica_id, model, version)

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        try:
            detail = await self._load("swap", replica_id, model, version)
        except BaseException:  # also when the step's time limit has passed
            self._routing.offer_adapters(replica_id)
            raise
        if self._routing.version(replica_id):
            status = await self._call_replica(replica_id, "status")
            opening = self._routing.open(replica_id, model, version, status["address"])
            await self._while_alive(replica_id, opening, "right after it loaded the new weights")
        return detail

    async def _load(self, method: str, replica_id: str, model: str, version: str) -> Detail:
        """Load a version into a running or sleeping engine."""
        engine = self._engines.get(replica_id)
        if engine is None or engine.node_config is None:
            raise EffectFailed("there is no such engine")
        async with self._version_on_node(model, version, engine.node_config) as path:
            if method == "swap":
                # An adapter fits only its base version, so the engine first finishes its adapter requests.
                withheld = self._routing.withhold_adapters(replica_id)
                await self._while_alive(replica_id, withheld, "before it loaded the new weights")
            with errors_as_failures():
                detail = await engine.supervisor.call(method, model, version, str(path))
        self._watch(replica_id, engine)
        return detail

    async def unload_adapter(self, name: str) -> None:
        """Make every engine unload the adapter `NAME@VERSION` once its requests have ended. Tries all engines; raises
        EffectFailed if one failed. An engine that ends meanwhile counts as done."""
        failed: EffectFailed | None = None
        for replica_id, engine in list(self._engines.items()):
            try:
                await self._call_replica(replica_id, "unload_adapter", name)
            except EffectFailed as error:
                if not engine.stopping:
                    failed = failed or error
        if failed is not None:
            raise failed

    def _replica_spec(self, plan: ReplicaView, node_config: NodeConfig, path: Path) -> ReplicaSpec:
        """Return the spec for the engine process."""
        devices = [self._nodes.device(device_id) for device_id in plan.devices]
        try:
            settings = dict(self._versions.engine_settings(plan.model, len(devices)))
        except (NotServable, LookupError) as error:
            reason, of_settings = f"{plan.model} cannot be served: {error}", isinstance(error, NotServable)
            blame: Blame = "input" if of_settings else "own"
            raise EffectFailed(reason, blame, of_settings=of_settings) from error
        away = node_config.name != self._nodes.home.name
        if settings.get("adapter_slots") and away:
            settings |= {
                "adapter_roots": (str(node_config.adapters),),
                "adapter_source": str(node_config.adapter_socket),
            }
        return ReplicaSpec(
            replica_id=plan.id,
            model=plan.model,
            version=plan.version,
            version_path=str(path),
            socket_path=str(node_config.socket_path(plan.id)),
            host=node_config.address if away else "",
            devices=tuple(device.index for device in devices),
            numa_nodes=node_config.numa_nodes(devices),
            kind=devices[0].kind,
            shm_root=str(node_config.shm_root),
            node=node_config.name,
            tensor_parallel=len(devices),
            **settings,
        )

    @contextlib.asynccontextmanager
    async def _version_on_node(self, model: str, version: str, node_config: NodeConfig) -> AsyncIterator[Path]:
        """Yield the version's directory on the engine's node; hold it until the engine has loaded the version."""
        try:
            at_home = await self._versions.in_memory(model, version)
        except (LookupError, OSError) as error:
            raise EffectFailed(f"version {version} of {model} cannot be read: {error}") from error
        try:
            yield await self._nodes.bring(node_config, at_home, f"serve {model}")
        finally:
            self._versions.taken(model, version)

    async def _call_replica(self, replica_id: str, method: str, *arguments: Any) -> Any:
        if (engine := self._engines.get(replica_id)) is None:
            raise EffectFailed("there is no such engine", "outside")
        with errors_as_failures():
            return await engine.supervisor.call(method, *arguments)

    def _find_engine(self, replica_id: str) -> _Engine | None:
        """Return the engine's record, or create a record if its named actor exists."""
        known = self._engines.get(replica_id)
        if known is not None and not known.supervisor.over:
            return known
        actor = find_actor(REPLICA + replica_id)
        return None if actor is None else self._record_engine(replica_id, actor)

    def _record_engine(self, replica_id: str, actor: Any) -> _Engine:
        engine = self._engines[replica_id] = _Engine(Supervisor(actor, REPLICA + replica_id))
        return engine

    def _watch(self, replica_id: str, engine: _Engine) -> None:
        if engine.watcher is None:
            engine.watcher = asyncio.create_task(self._wait_dead(replica_id, engine))

    async def _wait_dead(self, replica_id: str, engine: _Engine) -> Blame:
        """Wait for the engine's death, report it, and return the blame."""
        blame: Blame = "own"
        try:
            dead = await engine.supervisor.call("wait_dead")
            reason = str(dead.get("exit", "the engine ended"))
            # The failed load step has already counted this failure.
            blame = "memory" if dead.get("starved") else "outside" if dead.get("load_failed") else "own"
        except (SupervisorDied, RayError) as error:
            reason, blame = first_line(error), "outside"
        if not engine.stopping:
            self._routing.close(replica_id)
            engine.died = reason, blame
            self._report_change()
        return blame

    async def observe_replicas(self) -> tuple[ReplicaView, ...]:
        """Return every replica that has an actor, even if another controller started it."""
        names = [name.removeprefix(REPLICA) for name in await actor_names() if name.startswith(REPLICA)]
        views = await asyncio.gather(*map(self._observe_replica, names))
        return tuple(view for view in views if view is not None)

    async def _observe_replica(self, replica_id: str) -> ReplicaView | None:
        engine = self._find_engine(replica_id)
        if engine is None:
            return None
        try:
            status = await engine.supervisor.status()
        except Silent as error:
            if not engine.supervisor.reported:
                raise
            log.warning("%s", error, extra={"replica": replica_id})
            return ReplicaView(replica_id, "", "", "dead", (), answered=False)
        except (SupervisorDied, RayError) as error:
            return ReplicaView(replica_id, "", "", "dead", (), failed=first_line(error), blame="outside")
        state, node = status["state"], status["node"]
        engine.node_config, engine.rss_bytes = self._nodes.config(node) or engine.node_config, status["rss_bytes"]
        if status.get("silent", False) != engine.hanging:
            engine.hanging = not engine.hanging
            self._routing.avoid(replica_id, engine.hanging)
        if state not in ("dead", "starting"):  # a failed start raises in the step that starts it
            self._watch(replica_id, engine)
        elif engine.watcher is not None:  # its watcher will report the cause in a moment
            await asyncio.wait({engine.watcher}, timeout=LOOK_S)
        if state == "ready" and (routed := self._routing.version(replica_id)):
            state = "open"
            if routed != status["version"]:  # the engine finished a swap after the step had ended
                await self._routing.open(replica_id, status["model"], status["version"], status["address"])
        devices = tuple(f"{node}/{index}" for index in status["devices"])
        model, version, settings, (failed, blame) = status["model"], status["version"], status["settings"], engine.died
        return ReplicaView(replica_id, model, version, state, devices, settings=settings, failed=failed, blame=blame)

    def resident_bytes(self) -> dict[str, int]:
        """Return the resident memory in bytes that each engine last reported, by replica id."""
        return {replica_id: engine.rss_bytes for replica_id, engine in self._engines.items()}
