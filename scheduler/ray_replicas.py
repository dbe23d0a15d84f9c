"""Replicas: one named detached actor per engine, its requests opened and drained at the gateways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from scheduler.effects import Detail, Event, ReplicaDied, ReplicaObserved, ReplicaOrder
from scheduler.errors import EffectFailed
from scheduler.ray_actors import actor_names, ask, find_actor, until_unnamed
from scheduler.ray_node import Place, stored_bytes
from scheduler.ray_nodes import Nodes, OnDeath
from serve.config import EngineConfig
from serve.replica import Replica
from serve.spec import ReplicaSpec

log = logging.getLogger(__name__)

ACTOR = "replica:"


class Routing(Protocol):
    """Which replicas the gateways send requests to; the controller's bus."""

    async def open(self, replica_id: str, model: str, version: str, socket_path: str) -> None:
        """Returns when every gateway has it in its table."""

    async def drain(self, replica_id: str) -> None:
        """No new requests; returns when every gateway reports none in flight."""

    async def withhold_adapters(self, replica_id: str) -> None:
        """No new requests of LoRA adapters; returns when every gateway knows."""

    def offer_adapters(self, replica_id: str) -> None:
        """Requests of adapters again, where they were withheld."""

    def is_open(self, replica_id: str) -> bool: ...

    def close(self, replica_id: str) -> None:
        """Forget a replica that is gone."""


class Versions(Protocol):
    """Where the bytes of model versions are."""

    async def in_memory(self, model: str, version: str) -> Path:
        """The version's directory in shared memory, read in from disk if need be, and held there until it is `taken`,
        once for each time that this returned. Raises LookupError."""

    def taken(self, model: str) -> None:
        """An engine of the model has loaded what was brought in for it, and holds it; or will not."""

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        """Fields of ReplicaSpec that depend on the model: task, dtype, max_model_len, kv_cache_bytes, ..."""


class Replicas:
    """The verbs on replicas, and what is true of them."""

    def __init__(
        self,
        nodes: Nodes,
        routing: Routing,
        versions: Versions,
        engine: EngineConfig,
        tell: Callable[[Event], None],
    ):
        self._nodes, self._routing, self._versions, self._engine, self._tell = nodes, routing, versions, engine, tell
        self.on_death: OnDeath = lambda device_ids, holder, reason: None
        self._replicas: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._watchers: dict[str, asyncio.Task] = {}
        self._stopping: set[str] = set()

    async def start_replica(self, order: ReplicaOrder, lease_id: str) -> Detail:
        place = self._nodes.place_of(order.devices, "start_replica", order.id)
        path, copied_bytes = await self._version_path("start_replica", order.id, order.model, order.version, place)
        try:
            spec = self._replica_spec(order, place, path)
            await self._nodes.wait_warm(place, "serve", "start_replica", order.id)
            self._stopping.discard(order.id)
            replica = self._replicas.get(order.id) or self._nodes.here(
                Replica, ACTOR + order.id, place, place.warm_socket("serve"), str(place.log_dir), self._engine
            )
            self._replicas[order.id], self._places[order.id] = replica, place
            detail = await ask("start_replica", order.id, replica.start.remote(spec))
        finally:
            self._versions.taken(order.model)
        self._watch(order.id, replica)
        # Of a version on another node nothing is read here.
        home = place.name == self._nodes.home.name
        read = await asyncio.to_thread(stored_bytes, Path(spec.version_path)) if home else None
        return {**detail, "bytes": read, "copied_bytes": copied_bytes}

    async def stop_replica(self, replica_id: str) -> Detail:
        self._stopping.add(replica_id)
        self._routing.close(replica_id)
        watcher = self._watchers.pop(replica_id, None)
        if watcher is not None:
            watcher.cancel()
        replica = self._replicas.pop(replica_id, None) or find_actor(ACTOR + replica_id)
        if replica is None:
            return None
        try:
            await replica.stop.remote()
        except RayError as error:
            log.warning("it did not stop by itself: %s", error, extra={"replica": replica_id})
        ray.kill(replica)  # its leash then kills whatever is left of the engine
        await until_unnamed(ACTOR + replica_id)
        place = self._places.pop(replica_id, None)
        if place is not None:
            await self._nodes.close_socket(place, replica_id)
        return None

    async def open_replica(self, replica_id: str) -> Detail:
        status = await self._status("open_replica", replica_id)
        if status["state"] != "ready":
            raise EffectFailed("open_replica", replica_id, f"the engine is {status['state']}")
        await self._open(replica_id, status["model"], status["version"])
        return None

    async def drain_replica(self, replica_id: str) -> Detail:
        watcher = self._watchers.get(replica_id)
        draining = asyncio.ensure_future(self._routing.drain(replica_id))
        await asyncio.wait({draining, *([watcher] if watcher else [])}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            raise EffectFailed("drain_replica", replica_id, "the engine died while it finished its requests")
        draining.result()
        return None

    async def sleep_replica(self, replica_id: str) -> Detail:
        return await self._ask_replica("sleep_replica", replica_id, "sleep")

    async def wake_replica(self, replica_id: str, model: str, version: str, lease_id: str) -> Detail:
        path, copied_bytes = await self._bring("wake_replica", replica_id, model, version)
        try:
            detail = await self._ask_replica("wake_replica", replica_id, "wake", model, version, path)
        finally:
            self._versions.taken(model)
        return {**detail, "copied_bytes": copied_bytes}

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        path, copied_bytes = await self._bring("swap_replica", replica_id, model, version)
        try:
            # Adapters belong to the weights they were trained on; the engine waits for those that it has requests of.
            await self._routing.withhold_adapters(replica_id)
            detail = await self._ask_replica("swap_replica", replica_id, "swap", model, version, path)
        except EffectFailed:
            self._routing.offer_adapters(replica_id)
            raise
        finally:
            self._versions.taken(model)
        if self._routing.is_open(replica_id):
            await self._open(replica_id, model, version)
        return {**detail, "copied_bytes": copied_bytes}

    async def unload_adapter(self, name: str) -> None:
        """No engine knows the adapter `NAME@VERSION` any more, once its requests have ended. All are asked; raises
        EffectFailed when one could not. One that ends meanwhile knows nothing any more."""
        failed: EffectFailed | None = None
        for replica_id in list(self._replicas):
            try:
                await self._ask_replica("unload_adapter", replica_id, "unload_adapter", name)
            except EffectFailed as error:
                if replica_id in self._replicas and replica_id not in self._stopping:
                    failed = failed or error
        if failed is not None:
            raise failed

    async def _open(self, replica_id: str, model: str, version: str) -> None:
        socket_path = await self._nodes.local_socket(self._places[replica_id], replica_id)
        await self._routing.open(replica_id, model, version, str(socket_path))

    def _replica_spec(self, order: ReplicaOrder, place: Place, path: Path) -> ReplicaSpec:
        """What the engine is to be told."""
        devices = [self._nodes.device(device_id) for device_id in order.devices]
        settings = dict(self._versions.engine_settings(order.model, order.tensor_parallel))
        if settings.get("adapter_slots") and place.name != self._nodes.home.name:
            settings |= {"adapter_roots": (str(place.adapters),), "adapter_source": str(place.adapter_socket)}
        return ReplicaSpec(
            replica_id=order.id,
            model=order.model,
            version=order.version,
            version_path=str(path),
            socket_path=str(place.socket_path(order.id)),
            devices=tuple(device.index for device in devices),
            numa_nodes=place.numa_nodes(devices),
            kind=devices[0].kind,
            shm_root=str(place.shm_root),
            node=place.name,
            tensor_parallel=order.tensor_parallel,
            **settings,
        )

    async def _version_path(
        self, verb: str, target: str, model: str, version: str, place: Place
    ) -> tuple[Path, int]:
        try:
            at_home = await self._versions.in_memory(model, version)
        except (LookupError, OSError) as error:
            raise EffectFailed(verb, target, f"version {version} of {model} cannot be read: {error}") from error
        try:
            return await self._nodes.bring(place, at_home, f"serve {model}", verb, target)
        except BaseException:
            self._versions.taken(model)
            raise

    async def _bring(self, verb: str, replica_id: str, model: str, version: str) -> tuple[str, int]:
        place = self._places.get(replica_id)
        if place is None:
            raise EffectFailed(verb, replica_id, "there is no such engine")
        path, copied_bytes = await self._version_path(verb, replica_id, model, version, place)
        return str(path), copied_bytes

    async def _status(self, verb: str, replica_id: str) -> dict[str, Any]:
        return await self._ask_replica(verb, replica_id, "status")

    async def _ask_replica(self, verb: str, replica_id: str, method: str, *arguments: Any) -> Any:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise EffectFailed(verb, replica_id, "there is no such engine")
        return await ask(verb, replica_id, getattr(replica, method).remote(*arguments))

    def _watch(self, replica_id: str, replica: Any) -> None:
        if replica_id not in self._watchers:
            self._watchers[replica_id] = asyncio.create_task(self._wait_dead(replica_id, replica))

    async def _wait_dead(self, replica_id: str, replica: Any) -> None:
        try:
            reason = str((await replica.wait_dead.remote()).get("exit", "the engine ended"))
            if replica_id not in self._stopping:
                status = await replica.status.remote()
                devices = tuple(f"{status['node']}/{index}" for index in status["devices"])
                self.on_death(devices, f"model {status['model']}", reason)
        except RayError as error:
            reason = f"its supervisor died: {error}".splitlines()[0]
        if replica_id not in self._stopping:
            self._routing.close(replica_id)
            self._tell(ReplicaDied(replica_id, reason))

    # --- the truth

    async def observe(self) -> tuple[ReplicaObserved, ...]:
        """Every replica that has an actor, whoever started it."""
        names = [name.removeprefix(ACTOR) for name in await actor_names() if name.startswith(ACTOR)]
        found = [await self._observe_replica(replica_id) for replica_id in names]
        return tuple(replica for replica in found if replica is not None)

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.stop_replica(replica_id) for replica_id in list(self._replicas)))

    async def _observe_replica(self, replica_id: str) -> ReplicaObserved | None:
        replica = self._replicas.get(replica_id) or find_actor(ACTOR + replica_id)
        if replica is None:
            return None
        self._replicas[replica_id] = replica
        try:
            status = await replica.status.remote()
        except RayError:
            return ReplicaObserved(replica_id, "", "", "dead", ())
        state, node = status["state"], status["node"]
        if (place := self._nodes.place(node)) is not None:
            self._places[replica_id] = place
        if state == "ready":
            self._watch(replica_id, replica)
            state = "open" if self._routing.is_open(replica_id) else "ready"
            if state == "open" and place is not None:
                with contextlib.suppress(EffectFailed):  # a node is going; the next look tells
                    await self._nodes.mend_socket(place, replica_id)
        devices = tuple(f"{node}/{index}" for index in status["devices"])
        return ReplicaObserved(replica_id, status["model"], status["version"], state, devices)

    async def resident_bytes(self) -> dict[str, int]:
        """Resident memory of each engine, by replica id."""
        found = {}
        for replica_id, replica in list(self._replicas.items()):
            try:
                found[replica_id] = (await replica.status.remote())["rss_bytes"]
            except RayError:
                continue  # it is being replaced; the watcher reports its death
        return found
