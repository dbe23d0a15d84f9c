"""The verbs, carried out with Ray: the one file of `scheduler` that imports Ray, `serve` and `train`.

Ray places and fences. A lease is a placement group over the custom resources `device:<id>` of exactly its devices; a
replica is a named detached actor; the ranks of a job are driven through one named detached actor per device. All of
these outlive the controller, so a restarted controller finds them again in `observe`. Ray is never in the data path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from runtime.errors import ChildDied, RuntimeLayerError
from runtime.node import NodeAgent, WarmSpec
from scheduler.effects import (
    Detail,
    Event,
    GroupEnded,
    GroupObserved,
    Observed,
    ReplicaDied,
    ReplicaObserved,
    ReplicaOrder,
)
from scheduler.errors import EffectFailed
from scheduler.inventory import Device, Holder, Lease
from serve.config import EngineConfig
from serve.errors import ServeError
from serve.replica import Replica
from serve.spec import ReplicaSpec
from train.errors import TrainError
from train.group import Group
from train.rank_host import RankHost
from train.spec import TrainSpec

log = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 30.0
WARM_TIMEOUT_S = 180.0
DEVICE_RESOURCE = "device:"


class Routing(Protocol):
    """Which replicas the gateways send requests to; the controller's bus."""

    async def open(self, replica_id: str, model: str, version: str, socket_path: str) -> None:
        """Returns when every gateway has it in its table."""

    async def drain(self, replica_id: str) -> None:
        """No new requests; returns when every gateway reports none in flight."""

    def is_open(self, replica_id: str) -> bool: ...

    def close(self, replica_id: str) -> None:
        """Forget a replica that is gone."""


class Versions(Protocol):
    """Where the bytes of model versions are."""

    async def in_memory(self, model: str, version: str) -> Path:
        """The version's directory in shared memory, read in from disk if need be. Raises LookupError."""

    def engine_settings(self, model: str, tensor_parallel: int) -> Mapping[str, Any]:
        """Fields of ReplicaSpec that depend on the model: task, dtype, max_model_len, kv_cache_bytes, ..."""


class Jobs(Protocol):
    """What a job's ranks are to do, and where their events go."""

    def catch_up(self, job_id: str) -> None:
        """Take in what earlier ranks of the job did that nobody has heard of."""

    async def prepare(self, job_id: str) -> None:
        """Bring in what `spec` is to name. Raises LookupError."""

    def spec(self, job_id: str) -> TrainSpec:
        """What the job's ranks are to do. Raises LookupError when it cannot be done any more."""

    def newest_snapshot(self, job_id: str) -> Path | None:
        """The newest snapshot that can be resumed from, in shared memory."""

    def on_event(self, job_id: str, event: dict[str, Any]) -> None:
        """An event of the job's ranks, see train.group."""

    def on_stopped(self, job_id: str) -> None:
        """Its ranks were ended by force."""


@dataclass(frozen=True, slots=True)
class RayBox:
    """Where the effects do their work."""

    devices: tuple[Device, ...]
    run_dir: Path
    log_dir: Path
    shm_root: Path
    warm: tuple[WarmSpec, ...]

    def socket_path(self, replica_id: str) -> str:
        return str(self.run_dir / "r" / f"{replica_id}.sock")

    def warm_socket(self, name: str) -> str:
        return next(spec.socket_path for spec in self.warm if spec.name == name)


class RayEffects:
    """Implements `scheduler.effects.Effects`. Lives in the controller's asyncio loop; Ray must be initialised."""

    def __init__(self, box: RayBox, routing: Routing, versions: Versions, jobs: Jobs, engine: EngineConfig):
        self._engine = engine
        self._box, self._routing, self._versions, self._jobs = box, routing, versions, jobs
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._devices = {device.id: device for device in box.devices}
        self._fences: dict[str, Any] = {}
        self._replicas: dict[str, Any] = {}
        self._hosts: dict[str, Any] = {}
        self._groups: dict[str, _RunningGroup] = {}
        self._watchers: dict[str, asyncio.Task] = {}
        self._stopping: set[str] = set()
        self._starting: set[str] = set()
        self._agent: Any = None

    async def connect(self) -> None:
        """Start or find the node agent and its warm parents. Returns at once; verbs wait for what they need."""
        self._agent = _named_actor(NodeAgent, "node:n0", [spec for spec in self._box.warm])
        await self._agent.start.remote()

    # --- fences -------------------------------------------------------------------------------------------------

    async def acquire(self, lease: Lease) -> Detail:
        table = await _table()
        if lease.id in table:
            return None
        bundles = [{f"{DEVICE_RESOURCE}{device_id}": 1} for device_id in lease.device_ids]
        fence = placement_group(bundles, strategy="PACK", name=lease.id, lifetime="detached")
        # Not `fence.ready()`: that runs a task, for which Ray first starts a worker process.
        if not await asyncio.to_thread(fence.wait, FENCE_TIMEOUT_S):
            remove_placement_group(fence)
            raise EffectFailed("acquire", lease.id, f"Ray did not give {lease.device_ids} in {FENCE_TIMEOUT_S:.0f} s")
        self._fences[lease.id] = fence
        return {"devices": list(lease.device_ids)}

    async def release(self, lease_id: str) -> Detail:
        fence = self._fences.pop(lease_id, None)
        if fence is None:
            if lease_id not in await _table():
                return None
            fence = ray.util.get_placement_group(lease_id)
        remove_placement_group(fence)
        # Removal is asynchronous; the next holder's acquire would only wait, but "released" must be true.
        async with asyncio.timeout(FENCE_TIMEOUT_S):
            while lease_id in await _table():
                await asyncio.sleep(0.005)
        return None

    # --- replicas -----------------------------------------------------------------------------------------------

    async def start_replica(self, order: ReplicaOrder, lease_id: str) -> Detail:
        spec = await self._replica_spec(order)
        await self._warm("serve", "start_replica", order.id)
        self._stopping.discard(order.id)
        replica = self._replicas.get(order.id) or self._new_replica(order.id)
        detail = await _ask("start_replica", order.id, replica.start.remote(spec))
        self._watch(order.id, replica)
        return detail

    async def stop_replica(self, replica_id: str) -> Detail:
        self._stopping.add(replica_id)
        self._routing.close(replica_id)
        watcher = self._watchers.pop(replica_id, None)
        if watcher is not None:
            watcher.cancel()
        replica = self._replicas.pop(replica_id, None) or _find_actor(f"replica:{replica_id}")
        if replica is None:
            return None
        try:
            await replica.stop.remote()
        except RayError as error:
            log.warning("replica %s did not stop by itself: %s", replica_id, error)
        ray.kill(replica)  # its leash then kills whatever is left of the engine
        await _until_unnamed(f"replica:{replica_id}")
        return None

    async def open_replica(self, replica_id: str) -> Detail:
        status = await self._status("open_replica", replica_id)
        if status["state"] != "ready":
            raise EffectFailed("open_replica", replica_id, f"the engine is {status['state']}")
        await self._routing.open(replica_id, status["model"], status["version"], self._box.socket_path(replica_id))
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
        path = await self._version_path("wake_replica", replica_id, model, version)
        return await self._ask_replica("wake_replica", replica_id, "wake", model, version, str(path))

    async def swap_replica(self, replica_id: str, model: str, version: str) -> Detail:
        path = await self._version_path("swap_replica", replica_id, model, version)
        detail = await self._ask_replica("swap_replica", replica_id, "swap", model, version, str(path))
        if self._routing.is_open(replica_id):
            await self._routing.open(replica_id, model, version, self._box.socket_path(replica_id))
        return detail

    def _new_replica(self, replica_id: str) -> Any:
        replica = _named_actor(Replica, f"replica:{replica_id}", self._box.warm_socket("serve"), str(self._box.log_dir))
        self._replicas[replica_id] = replica
        return replica

    async def _replica_spec(self, order: ReplicaOrder) -> ReplicaSpec:
        path = await self._version_path("start_replica", order.id, order.model, order.version)
        devices = [self._devices[device_id] for device_id in order.devices]
        return ReplicaSpec(
            replica_id=order.id,
            model=order.model,
            version=order.version,
            version_path=str(path),
            socket_path=self._box.socket_path(order.id),
            devices=tuple(device.index for device in devices),
            kind=devices[0].kind,
            shm_root=str(self._box.shm_root),
            tensor_parallel=order.tensor_parallel,
            **self._versions.engine_settings(order.model, order.tensor_parallel),
        )

    async def _version_path(self, verb: str, target: str, model: str, version: str) -> Path:
        try:
            return await self._versions.in_memory(model, version)
        except (LookupError, OSError) as error:
            raise EffectFailed(verb, target, f"version {version} of {model} cannot be read: {error}") from error

    async def _status(self, verb: str, replica_id: str) -> dict[str, Any]:
        return await self._ask_replica(verb, replica_id, "status")

    async def _ask_replica(self, verb: str, replica_id: str, method: str, *arguments: Any) -> Any:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise EffectFailed(verb, replica_id, "there is no such engine")
        return await _ask(verb, replica_id, getattr(replica, method).remote(*arguments))

    def _watch(self, replica_id: str, replica: Any) -> None:
        if replica_id not in self._watchers:
            self._watchers[replica_id] = asyncio.create_task(self._wait_dead(replica_id, replica))

    async def _wait_dead(self, replica_id: str, replica: Any) -> None:
        try:
            reason = str((await replica.wait_dead.remote()).get("exit", "the engine ended"))
        except RayError as error:
            reason = f"its supervisor died: {error}".splitlines()[0]
        if replica_id not in self._stopping:
            self._routing.close(replica_id)
            self._events.put_nowait(ReplicaDied(replica_id, reason))

    # --- training groups ----------------------------------------------------------------------------------------

    async def start_group(self, job_id: str, lease: Lease) -> Detail:
        running = self._groups.get(job_id)
        if running is not None and running.lease.id == lease.id:
            return None
        await self._warm("train", "start_group", job_id)
        try:
            self._jobs.catch_up(job_id)
            await self._jobs.prepare(job_id)
            spec = self._jobs.spec(job_id)
        except LookupError as error:
            raise EffectFailed("start_group", job_id, str(error)) from error
        snapshot = await asyncio.to_thread(self._jobs.newest_snapshot, job_id)
        hosts = [_Host(self._host(device_id)) for device_id in lease.device_ids]
        devices = [self._devices[device_id] for device_id in lease.device_ids]
        group = Group(on_event=lambda event: self._jobs.on_event(job_id, event))
        began_s = time.monotonic()
        self._starting.add(job_id)
        try:
            await self._start(job_id, group, spec, hosts, devices, snapshot)
        finally:
            self._starting.discard(job_id)
        running = self._groups[job_id] = _RunningGroup(group, lease)
        running.watcher = asyncio.create_task(self._wait_group(job_id, running))
        return {"seconds": time.monotonic() - began_s, "snapshot": snapshot.name if snapshot else None}

    async def _start(self, job_id: str, group: Group, spec: TrainSpec, hosts: list[_Host], devices: list[Device],
                     snapshot: Path | None) -> None:  # fmt: skip
        await _ask(
            "start_group",
            job_id,
            group.start(
                spec,
                hosts,
                ["cpu" if device.kind == "cpu" else str(device.index) for device in devices],
                str(snapshot) if snapshot else None,
            ),
        )

    async def suspend_group(self, job_id: str) -> Detail:
        running = self._groups.get(job_id)
        if running is None:
            return None
        report = await _ask("suspend_group", job_id, running.group.suspend())
        await running.watcher
        if report is None and running.ended is not None and running.ended.outcome == "failed":
            raise EffectFailed("suspend_group", job_id, running.ended.error)
        self._groups.pop(job_id, None)
        return asdict(report) if report is not None else None

    async def stop_group(self, job_id: str) -> Detail:
        running = self._groups.pop(job_id, None)
        if running is not None:
            running.watcher.cancel()
            if running.ended is None:
                await _ask("stop_group", job_id, running.group.kill())
        for host in await self._hosts_of(job_id):
            await _ask("stop_group", job_id, host.kill.remote())
        self._jobs.on_stopped(job_id)
        return None

    async def _wait_group(self, job_id: str, running: _RunningGroup) -> None:
        outcome = await running.group.wait()
        if outcome.outcome == "suspended":
            return
        error = outcome.error or {}
        running.ended = GroupEnded(
            job_id,
            running.lease.id,
            outcome.outcome,
            outcome.step,
            error.get("message", ""),
            error.get("retryable", True),
        )
        self._events.put_nowait(running.ended)

    def _host(self, device_id: str) -> Any:
        if device_id not in self._hosts:
            self._hosts[device_id] = _named_actor(
                RankHost, f"rank:{device_id}", self._box.warm_socket("train"), str(self._box.log_dir)
            )
        return self._hosts[device_id]

    async def _hosts_of(self, job_id: str) -> list[Any]:
        """Supervisors whose living rank belongs to the job."""
        return [self._host(device_id) for device_id, owner in (await self._living_ranks()).items() if owner == job_id]

    async def _living_ranks(self) -> dict[str, str]:
        """Device id to the job whose rank lives there."""
        found = {}
        for name in await _names():
            if name.startswith("rank:"):
                device_id = name.removeprefix("rank:")
                try:
                    status = await self._host(device_id).status.remote()
                except RayError:
                    self._hosts.pop(device_id, None)  # its actor died, and the rank on its leash with it
                    continue
                if status["alive"]:
                    found[device_id] = status["job_id"]
        return found

    # --- the truth ----------------------------------------------------------------------------------------------

    async def observe(self) -> Observed:
        names = await _names()
        replicas = [
            await self._observe_replica(name.removeprefix("replica:")) for name in names if name.startswith("replica:")
        ]
        leases = tuple(_lease(name, bundles) for name, bundles in (await _table()).items())
        return Observed(
            devices=self._box.devices,
            leases=leases,
            replicas=tuple(replica for replica in replicas if replica is not None),
            groups=tuple(await self._observe_groups(leases)),
        )

    async def next_event(self) -> Event:
        return await self._events.get()

    async def _observe_replica(self, replica_id: str) -> ReplicaObserved | None:
        replica = self._replicas.get(replica_id) or _find_actor(f"replica:{replica_id}")
        if replica is None:
            return None
        self._replicas[replica_id] = replica
        try:
            status = await replica.status.remote()
        except RayError:
            return ReplicaObserved(replica_id, "", "", "dead", ())
        state = status["state"]
        if state == "ready":
            self._watch(replica_id, replica)
            state = "open" if self._routing.is_open(replica_id) else "ready"
        devices = tuple(f"n0/{index}" for index in status["devices"])
        return ReplicaObserved(replica_id, status["model"], status["version"], state, devices)

    async def _observe_groups(self, leases: tuple[Lease, ...]) -> list[GroupObserved]:
        found: dict[str, GroupObserved] = {
            job_id: GroupObserved(job_id, running.lease.device_ids, running.lease.id, running.ended)
            for job_id, running in self._groups.items()
        }
        orphans: dict[str, list[str]] = {}
        for device_id, job_id in (await self._living_ranks()).items():
            if job_id not in found and job_id not in self._starting:
                orphans.setdefault(job_id, []).append(device_id)
        for job_id, devices in orphans.items():
            # Ranks whose controller died: nobody reads their events. They end, and the job resumes from its snapshot.
            lease = next((le for le in leases if le.holder == Holder("job", job_id)), None)
            lease_id = lease.id if lease else ""
            lost = GroupEnded(job_id, lease_id, "failed", 0, "the controller was restarted while it trained")
            found[job_id] = GroupObserved(job_id, tuple(devices), lease_id, lost)
        return list(found.values())

    async def resident_bytes(self) -> dict[str, int]:
        """Resident memory of each engine, by replica id."""
        found = {}
        for replica_id, replica in list(self._replicas.items()):
            try:
                found[replica_id] = (await replica.status.remote())["rss_bytes"]
            except RayError:
                continue  # it is being replaced; the watcher reports its death
        return found

    async def stop_everything(self) -> None:
        """End all engines and ranks; the box ends."""
        await asyncio.gather(*(self.stop_replica(replica_id) for replica_id in list(self._replicas)))
        await asyncio.gather(*(self.stop_group(job_id) for job_id in list(self._groups)))

    async def _warm(self, name: str, verb: str, target: str) -> None:
        await _ask(verb, target, self._agent.wait_warm.remote(name, WARM_TIMEOUT_S))


@dataclass(slots=True)
class _RunningGroup:
    group: Group
    lease: Lease
    watcher: asyncio.Task | None = None
    ended: GroupEnded | None = None


class _Host:
    """A RankHost behind its actor handle. An actor that died took its rank along, so its death is the rank's."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            try:
                return await getattr(self._actor, method).remote(*arguments, **named)
            except ActorDiedError as error:
                raise ChildDied("rank", 0, "its supervisor's", _first_line(error)) from error

        return call


def _named_actor(body: type, name: str, *arguments: Any) -> Any:
    """Start or find a thin supervisor: named, detached, restart left to us, no resources (the lease fences)."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(body)
        .options(
            name=name,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=64,
            max_restarts=0,
            scheduling_strategy=here,
        )  # fmt: skip
        .remote(*arguments)
    )


def _find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def _names() -> list[str]:
    return await asyncio.to_thread(list_named_actors)


async def _until_unnamed(name: str) -> None:
    async with asyncio.timeout(FENCE_TIMEOUT_S):
        while name in await _names():
            await asyncio.sleep(0.01)


async def _table() -> dict[str, list[dict[str, float]]]:
    """Living placement groups: name to bundles."""
    table = await asyncio.to_thread(placement_group_table)
    return {
        entry["name"]: list(entry["bundles"].values())
        for entry in table.values()
        if entry["state"] in ("CREATED", "PENDING", "RESCHEDULING") and entry["name"]
    }


def _lease(name: str, bundles: list[dict[str, float]]) -> Lease:
    _, kind, holder_id = name.split(":", 2)
    devices = tuple(
        key.removeprefix(DEVICE_RESOURCE) for bundle in bundles for key in bundle if key.startswith(DEVICE_RESOURCE)
    )
    return Lease(name, Holder(kind, holder_id), devices)


async def _ask(verb: str, target: str, answer: Awaitable[Any]) -> Any:
    """Await an actor's or group's answer; whatever goes wrong there becomes EffectFailed, with its first line."""
    try:
        return await answer
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise EffectFailed(verb, target, _first_line(cause)) from error
    except (RuntimeLayerError, ServeError, TrainError, OSError, TimeoutError) as error:
        raise EffectFailed(verb, target, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
