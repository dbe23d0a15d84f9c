"""Tracks all nodes of the box: which exist, their devices, and how the home node reaches them.

A node joins through Ray's own clustering (`ray start --address`) and announces itself with an actor `node:<name>`
pinned to it. It is gone when Ray says so; its devices then leave the inventory at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from runtime.devices.kind import Reading
from scheduler.core.errors import EffectFailed, NodeNameTaken
from scheduler.core.workload import Device, NodeChange
from scheduler.devices.host_reading import MemoryReading
from scheduler.ray.actors import RANK, REPLICA, actor_names, errors_as_failures, find_actor, named_actor, within
from scheduler.ray.node import NODE, Node, NodeConfig, NodeReport
from weights.format.errors import WeightsError
from weights.format.names import Name
from weights.memory.lease import StoredVersion

log = logging.getLogger(__name__)

NAMESPACE = "appliance"
DEVICE_RESOURCE = "device:"  # names a node's devices to Ray, which tells nodes apart by them
WARM_TIMEOUT_S = 180.0
LOOK_EVERY_S = 1.0
ANSWER_S = 1.0  # how long a look waits for a node's answer
FORGET_S = 10.0  # how long a deletion waits for another node; it may be in the midst of a copy, and deletes after it
START_S = 60.0  # how long it waits for an agent that starts
EMPTY_EVERY_S = 0.5


@dataclass(slots=True)
class _Known:
    config: NodeConfig
    ray_id: str
    actor: Any
    leaves: bool = False
    memory: MemoryReading | None = None
    answered_s: float | None = None  # how long its last answer took; None: it does not answer

    @property
    def devices(self) -> tuple[Device, ...]:
        if not self.leaves:
            return self.config.devices
        return tuple(
            replace(d, health="draining", health_reason="its node leaves the box") for d in self.config.devices
        )


class Nodes:
    """The nodes as the controller knows them. `home` is the controller's own. Ray must be initialised."""

    def __init__(
        self,
        home: NodeConfig,
        on_change: Callable[[str, NodeChange, tuple[Device, ...]], None] = lambda name, change, devices: None,
        removed: Callable[[], Collection[str]] = tuple,
    ):
        """on_change: called with each node that joined or left, and its devices. removed: names that are taken out of
        the box; none of them is taken in."""
        self.home, self._on_change, self._removed = home, on_change, removed
        self._known: dict[str, _Known] = {}

    async def connect(self) -> None:
        """Start or find the home node's agent and discover other nodes. Warm parents start in the background."""
        await announce(self.home)
        await self.look()

    async def watch(self, report_change: Callable[[], None]) -> None:
        """Report every node that joins or leaves."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if await self.look():
                report_change()

    async def look(self) -> bool:
        """Add nodes that joined and drop nodes that are gone; True if there were any."""
        alive = await _alive()
        before = {name: known.leaves for name, known in self._known.items()}
        removed = set(self._removed()) - {self.home.name}
        for name, known in list(self._known.items()):
            if known.ray_id not in alive or name in removed:  # a removed one may not end when it is asked to
                level = logging.INFO if known.leaves else logging.ERROR
                log.log(level, "node is gone with its %d devices", len(known.config.devices), extra={"node": name})
                del self._known[name]
                self._on_change(name, "left" if known.leaves else "lost", known.config.devices)
        agents = {}
        for full in await actor_names():
            if full.startswith(NODE) and (actor := find_actor(full)) is not None:
                agents[full.removeprefix(NODE)] = actor
        for name, actor in agents.items():
            if name in removed:
                # Ray's TLS lets it in as long as its certificate is valid: end its Ray whenever it is there.
                log.warning("node was removed from the box: its Ray is ended", extra={"node": name})
                await _answer(actor.end.remote())  # it dies of it, or is asked again by the next look
            elif name not in before:
                await self._take_in(name, actor, alive)
        for name, known in list(self._known.items()):  # two looks may run at once
            if name not in agents:  # only its agent died: engines and ranks there continue
                try:
                    known.actor = await _start(known.config, known.ray_id)
                except (RayError, TimeoutError):
                    if name == self.home.name:
                        raise
                    log.warning("the node's agent does not start; the node seems to be dying", extra={"node": name})
        await asyncio.gather(*map(self._read_report, self._known.values()))
        return {name: known.leaves for name, known in self._known.items()} != before

    async def _read_report(self, known: _Known) -> None:
        began_s = time.monotonic()
        report: NodeReport | None = await _answer(known.actor.report.remote())
        known.answered_s = None if report is None else time.monotonic() - began_s
        if report is not None:
            if report.leaves and not known.leaves:
                log.info("node is leaving; its holders release its devices first", extra={"node": known.config.name})
            known.leaves, known.memory = known.leaves or report.leaves, report.memory

    async def _take_in(self, name: str, actor: Any, alive: dict[str, set[str]]) -> None:
        home = name == self.home.name
        node_config = await _answer(actor.config.remote(), START_S if home else ANSWER_S)
        ray_id = node_config and _ray_id(node_config, alive)
        if ray_id is not None:
            self._known[name] = _Known(node_config, ray_id, actor)
            if not home:
                log.info("node joined with %d devices", len(node_config.devices), extra={"node": name})
                self._on_change(name, "joined", node_config.devices)

    def memory(self) -> dict[str, MemoryReading]:
        """The last report of each node but home about its host's memory."""
        away = (known for name, known in self._known.items() if name != self.home.name)
        return {known.config.name: known.memory for known in away if known.memory is not None}

    def status(self) -> list[dict[str, Any]]:
        """Each node, home first, at the last look. answered_s: None if it did not answer. memory: as last reported."""
        home = self.home.name
        return [
            {
                "id": name,
                "address": known.config.address,
                "home": name == home,
                "answered_s": known.answered_s,
                "leaves": known.leaves,
                "devices": [device.id for device in known.config.devices],
                "memory_bytes": None if known.memory is None else known.memory.total,
                "memory_available_bytes": None if known.memory is None else known.memory.available,
            }
            for name, known in sorted(self._known.items(), key=lambda item: (item[0] != home, item[0]))
        ]

    async def on(self, node: str, method: str, *arguments: Any) -> Any:
        """The answer of a node's agent. Raises EffectFailed."""
        with errors_as_failures():
            return await getattr(self._of(node).actor, method).remote(*arguments)

    async def of_store(self, name: str, method: str, *arguments: Any) -> Any:
        """What the store of weights on a node answers. Raises EffectFailed."""
        return await within(self.on(name, "of_store", method, *arguments), NODE + name)

    async def forget(self, names: Collection[Name]) -> None:
        """Have the other nodes remove their copies of what was deleted at home. One that does not answer is named in
        the log, and has them until it needs the room or ends."""
        await self._call_others("forget", list(names), seconds=FORGET_S, left="copies of what was deleted")

    async def release_job(self, job_id: str) -> None:
        """Have the other nodes release the copies that they hold for this job, wherever it ran."""
        await self._call_others("forget_job", job_id, True, seconds=ANSWER_S, left=f"copies for {job_id}")

    async def _call_others(self, method: str, *arguments: Any, seconds: float, left: str) -> None:
        """left: what may stay on a node that does not answer in time."""

        async def call(name: str) -> None:
            try:
                await within(self.on(name, method, *arguments), NODE + name, seconds)
            except EffectFailed as error:
                log.warning("%s may stay there: %s", left, error.reason, extra={"node": name})

        await asyncio.gather(*(call(name) for name in self._known if name != self.home.name))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices: those of home first, then the other nodes' by node name."""
        there = dict(self._known)  # in one go, for threads ask too
        names = sorted(there, key=lambda name: (name != self.home.name, len(name), name))
        return tuple(device for name in names for device in there[name].devices)

    def device_count(self, name: str) -> int:
        """How many devices this node has; 0 when it is gone."""
        return sum(device.node == name for device in self.devices)

    def alike(self) -> tuple[str, ...]:
        """Nodes with the same kind of devices as home, home first: a job that home prepared may run on any of them."""
        kind = self.home.devices[0].kind
        return tuple(dict.fromkeys([self.home.name, *(device.node for device in self.devices if device.kind == kind)]))

    def device(self, device_id: str) -> Device:
        """Raises EffectFailed when the device or its node is gone."""
        if (device := next((d for d in self.devices if d.id == device_id), None)) is None:
            raise EffectFailed(f"device {device_id} is gone", "outside")
        return device

    def config(self, name: str) -> NodeConfig | None:
        """Returns None when the node is gone."""
        known = self._known.get(name)
        return known.config if known else None

    def config_of(self, device_ids: tuple[str, ...]) -> NodeConfig:
        """The node that has these devices. Raises EffectFailed when it is gone."""
        return self._of(self.device(device_ids[0]).node).config

    def here(self, body: type, name: str, node_config: NodeConfig, *arguments: Any) -> Any:
        """Start or find an actor on this node. Raises EffectFailed when the node is gone."""
        return named_actor(body, name, self._of(node_config.name).ray_id, *arguments)

    async def readings(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """The health of every GPU as the drivers of all nodes report it. Omits nodes that do not answer, and released
        devices, given by id: the nodes do not keep them open."""
        calls = (_answer(known.actor.readings.remote(released)) for known in self._known.values())
        return tuple(one for answer in await asyncio.gather(*calls) for one in answer or ())

    async def wait_warm(self, node_config: NodeConfig, name: str) -> None:
        """Returns when the node's warm parent accepts requests."""
        await self.on(node_config.name, "wait_warm", name, WARM_TIMEOUT_S)

    async def bring(self, node_config: NodeConfig, version_dir: Path, holder: str) -> Path:
        """Ensure the node has this version, adapter or snapshot of home, which the caller holds, copying it if
        necessary. Returns its path there. It stays there until `holder` takes another."""
        if node_config.name == self.home.name:
            return version_dir
        try:
            stored = StoredVersion.read(version_dir)
        except (WeightsError, OSError) as error:
            raise EffectFailed(f"{version_dir} cannot be read: {error}") from error
        name, home = Name(stored.kind, stored.model, stored.version), self._of(self.home.name).actor
        return await self.on(node_config.name, "take", home, name, version_dir, holder)

    async def bring_home(self, node: str, name: Name, remote: Path) -> Path:
        """Copy home what the node wrote at `remote`; returns the new path. Raises EffectFailed."""
        there = self._of(node).actor
        kept = await self.on(self.home.name, "keep", there, name, remote)
        await self.on(node, "unpin", remote)
        return kept

    async def bring_job(self, node: str, folder: Path) -> Path:
        """The job's folder on another node, filled with the data in home's `folder`."""
        return await self.on(node, "take_job", self._of(self.home.name).actor, folder)

    def _of(self, node: str) -> _Known:
        if (known := self._known.get(node)) is None:
            raise EffectFailed(f"node {node} is gone", "outside")
        return known


async def announce(node_config: NodeConfig) -> None:
    """Register this node with the box, once Ray runs on it. Raises NodeNameTaken, LookupError without Ray here."""
    ray_id = _ray_id(node_config, await _alive())
    if ray_id is None:
        raise LookupError(f"no Ray node has the devices of {node_config.name}; `ray start` names them as resources")
    actor = await _start(node_config, ray_id)
    known = await actor.config.remote()
    if known != node_config:
        raise NodeNameTaken(node_config.name, known.address)


async def announced_from(node_config: NodeConfig, head: str) -> None:
    """Announce a node whose Ray has joined the head at `head`. Call it in a separate process on that node."""
    async with _joined(node_config, head):
        await announce(node_config)


async def emptied(node_config: NodeConfig, head: str) -> None:
    """Tell the box that this node is leaving; returns when nobody holds its devices, and home has what jobs made here.
    Call it in a separate process on that node."""
    async with _joined(node_config, head):
        node = find_actor(NODE + node_config.name)
        if node is not None:
            await node.leave.remote()
            await asyncio.sleep(2 * LOOK_EVERY_S)  # home has read it by then: an idle node would count as lost
        while await _in_use(node_config.name):
            await asyncio.sleep(EMPTY_EVERY_S)


async def _in_use(node: str) -> bool:
    """Whether an engine is awake or a rank runs here, or results of a job are still being copied home."""
    agent, names = find_actor(NODE + node), await actor_names()
    actors = [find_actor(name) for name in names if name.startswith((REPLICA, f"{RANK}{node}/"))]
    try:
        for status in [await actor.status.remote() for actor in actors if actor is not None]:
            engine = status.get("node") == node and status["state"] not in ("asleep", "dead")
            if engine or status.get("job_id"):
                return True
        return agent is not None and await agent.holds_jobs.remote()
    except RayError:  # busy, or it has just died: the next look tells
        return True


@asynccontextmanager
async def _joined(node_config: NodeConfig, head: str) -> AsyncIterator[None]:
    await asyncio.to_thread(
        ray.init, address=head, namespace=NAMESPACE, log_to_driver=False, _node_ip_address=node_config.address
    )
    try:
        yield
    finally:
        ray.shutdown()


async def _start(node_config: NodeConfig, ray_id: str) -> Any:
    actor = named_actor(Node, NODE + node_config.name, ray_id, node_config)
    async with asyncio.timeout(START_S):
        await actor.start.remote()
    return actor


async def _answer(answer: Awaitable[Any], seconds: float = ANSWER_S) -> Any:
    """The answer of a node's agent. None if it is dying or busy, which the next look shows: one that is stopped must
    not hold up the look at all others."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except (RayError, TimeoutError):
        return None


async def _alive() -> dict[str, set[str]]:
    """Ray's id of each living node, mapped to its resource names."""
    nodes = await asyncio.to_thread(ray.nodes)
    return {node["NodeID"]: set(node["Resources"]) for node in nodes if node["Alive"]}


def _ray_id(node_config: NodeConfig, alive: dict[str, set[str]]) -> str | None:
    wanted = {f"{DEVICE_RESOURCE}{device.id}" for device in node_config.devices}
    return next((ray_id for ray_id, resources in alive.items() if wanted <= resources), None)
