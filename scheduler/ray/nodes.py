"""Tracks all nodes of the box and their devices, and calls the nodes' agents.

A node joins through Ray's own clustering (`ray start --address`) and announces itself with an actor `node:<name>`
pinned to it. When Ray reports it dead, its devices leave the inventory at once.
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
DEVICE_RESOURCE = "device:"  # prefix of a Ray resource for each device, which identifies the node
WARM_TIMEOUT_S = 180.0
LOOK_EVERY_S = 1.0
ANSWER_S = 1.0  # time limit for a node's answer to a poll
FORGET_S = 10.0  # time limit for a deletion on another node, which may have to finish a copy first
START_S = 60.0  # time limit for the start of an agent
EMPTY_EVERY_S = 0.5


@dataclass(slots=True)
class _Known:
    config: NodeConfig
    ray_id: str
    actor: Any
    leaves: bool = False
    memory: MemoryReading | None = None
    answered_s: float | None = None  # seconds that its last answer took; None: it does not answer

    @property
    def devices(self) -> tuple[Device, ...]:
        if not self.leaves:
            return self.config.devices
        return tuple(
            replace(d, health="draining", health_reason="its node leaves the box") for d in self.config.devices
        )


class Nodes:
    """The nodes that the controller knows. `home`: the controller's node. Ray must be initialised."""

    def __init__(
        self,
        home: NodeConfig,
        on_change: Callable[[str, NodeChange, tuple[Device, ...]], None] = lambda name, change, devices: None,
        removed: Callable[[], Collection[str]] = tuple,
    ):
        """on_change: called with each node that joins or leaves the box, and its devices. removed: returns the names of
        nodes that were removed from the box and must not join."""
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
        """Add nodes that joined and drop nodes that are gone; True if there was a change."""
        alive = await _alive()
        before = {name: known.leaves for name, known in self._known.items()}
        removed = set(self._removed()) - {self.home.name}
        for name, known in list(self._known.items()):
            if known.ray_id not in alive or name in removed:  # a removed node may ignore the request to end
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
                # Ray's TLS admits a removed node while its certificate is valid: end its Ray whenever it appears.
                log.warning("node was removed from the box: ending its Ray", extra={"node": name})
                await _answer(actor.end.remote())  # if the node does not end, the next poll repeats the request
            elif name not in before:
                await self._take_in(name, actor, alive)
        for name, known in list(self._known.items()):  # two polls may run at once
            if name not in agents:  # only the node's agent died: its engines and ranks continue
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
        """Return the last memory report of each node except home."""
        away = (known for name, known in self._known.items() if name != self.home.name)
        return {known.config.name: known.memory for known in away if known.memory is not None}

    def status(self) -> list[dict[str, Any]]:
        """Return each node's status at the last poll, home first. answered_s: None if it did not answer. memory: last
        report."""
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
        """Call a method of a node's agent. Raises EffectFailed."""
        with errors_as_failures():
            return await getattr(self._of(node).actor, method).remote(*arguments)

    async def of_store(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the weight store on a node. Raises EffectFailed."""
        return await within(self.on(name, "of_store", method, *arguments), NODE + name)

    async def forget(self, names: Collection[Name]) -> None:
        """Have the other nodes remove their copies of names deleted at home. A node that does not answer is logged; its
        copies stay until it needs the memory or ends."""
        await self._call_others("forget", list(names), seconds=FORGET_S, left="copies of deleted versions")

    async def release_job(self, job_id: str) -> None:
        """Have all other nodes release the copies that they hold for this job."""
        await self._call_others("forget_job", job_id, True, seconds=ANSWER_S, left=f"copies for {job_id}")

    async def _call_others(self, method: str, *arguments: Any, seconds: float, left: str) -> None:
        """Call a method on all nodes except home. left: noun, in the log, for data that may stay on a node that does
        not answer."""

        async def call(name: str) -> None:
            try:
                await within(self.on(name, method, *arguments), NODE + name, seconds)
            except EffectFailed as error:
                log.warning("%s may stay there: %s", left, error.reason, extra={"node": name})

        await asyncio.gather(*(call(name) for name in self._known if name != self.home.name))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices: home's devices first, then the other nodes' devices by node name."""
        there = dict(self._known)  # an atomic copy, because other threads also read `devices`
        names = sorted(there, key=lambda name: (name != self.home.name, len(name), name))
        return tuple(device for name in names for device in there[name].devices)

    def device_count(self, name: str) -> int:
        """Return the node's number of devices; 0 when the node is gone."""
        return sum(device.node == name for device in self.devices)

    def alike(self) -> tuple[str, ...]:
        """Return the nodes with the same kind of devices as home, home first. Each may run a job that home prepared."""
        kind = self.home.devices[0].kind
        return tuple(dict.fromkeys([self.home.name, *(device.node for device in self.devices if device.kind == kind)]))

    def device(self, device_id: str) -> Device:
        """Return the device with this id. Raises EffectFailed when the device or its node is gone."""
        if (device := next((d for d in self.devices if d.id == device_id), None)) is None:
            raise EffectFailed(f"device {device_id} is gone", "outside")
        return device

    def config(self, name: str) -> NodeConfig | None:
        """Return the configuration of this node; None when the node is gone."""
        known = self._known.get(name)
        return known.config if known else None

    def config_of(self, device_ids: tuple[str, ...]) -> NodeConfig:
        """Return the configuration of the node that has these devices. Raises EffectFailed when the node is gone."""
        return self._of(self.device(device_ids[0]).node).config

    def here(self, body: type, name: str, node_config: NodeConfig, *arguments: Any) -> Any:
        """Start or find an actor on this node. Raises EffectFailed when the node is gone."""
        return named_actor(body, name, self._of(node_config.name).ray_id, *arguments)

    async def readings(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """Return the health of all GPUs as their drivers report it, without nodes that do not answer. released: ids of
        devices to skip and to close."""
        calls = (_answer(known.actor.readings.remote(released)) for known in self._known.values())
        return tuple(one for answer in await asyncio.gather(*calls) for one in answer or ())

    async def wait_warm(self, node_config: NodeConfig, name: str) -> None:
        """Wait until the node's warm parent accepts requests."""
        await self.on(node_config.name, "wait_warm", name, WARM_TIMEOUT_S)

    async def bring(self, node_config: NodeConfig, version_dir: Path, holder: str) -> Path:
        """Copy a version, adapter or snapshot of home, held by the caller, to the node if missing. Returns its path on
        the node, valid until `holder` takes another copy."""
        if node_config.name == self.home.name:
            return version_dir
        try:
            stored = StoredVersion.read(version_dir)
        except (WeightsError, OSError) as error:
            raise EffectFailed(f"{version_dir} cannot be read: {error}") from error
        name, home = Name(stored.kind, stored.model, stored.version), self._of(self.home.name).actor
        return await self.on(node_config.name, "take", home, name, version_dir, holder)

    async def bring_home(self, node: str, name: Name, remote: Path) -> Path:
        """Copy home the version that the node wrote at `remote`; return the new path. Raises EffectFailed."""
        there = self._of(node).actor
        kept = await self.on(self.home.name, "keep", there, name, remote)
        await self.on(node, "unpin", remote)
        return kept

    async def bring_job(self, node: str, folder: Path) -> Path:
        """Return the path of the job's folder on another node, with a copy of the data that home has in `folder`."""
        return await self.on(node, "take_job", self._of(self.home.name).actor, folder)

    def _of(self, node: str) -> _Known:
        if (known := self._known.get(node)) is None:
            raise EffectFailed(f"node {node} is gone", "outside")
        return known


async def announce(node_config: NodeConfig) -> None:
    """Register this node with the box, once Ray runs on it. Raises NodeNameTaken; LookupError if Ray does not run."""
    ray_id = _ray_id(node_config, await _alive())
    if ray_id is None:
        raise LookupError(f"no Ray node has the devices of {node_config.name}; list them as resources of `ray start`")
    actor = await _start(node_config, ray_id)
    known = await actor.config.remote()
    if known != node_config:
        raise NodeNameTaken(node_config.name, known.address)


async def announced_from(node_config: NodeConfig, head: str) -> None:
    """Announce this node, whose Ray has joined the head node at `head`. Call it in a separate process."""
    async with _joined(node_config, head):
        await announce(node_config)


async def emptied(node_config: NodeConfig, head: str) -> None:
    """Report that this node is leaving; return when its devices have no holders and its jobs' results are copied home.
    Call it in a separate process."""
    async with _joined(node_config, head):
        node = find_actor(NODE + node_config.name)
        if node is not None:
            await node.leave.remote()
            await asyncio.sleep(2 * LOOK_EVERY_S)  # until home has read the report, or an idle node counts as lost
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
    except RayError:  # the agent is busy or has just died: the next poll shows which
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
    """Return the answer of a node's agent; None if the agent is dying or busy. A stopped agent delays no other poll."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except (RayError, TimeoutError):
        return None


async def _alive() -> dict[str, set[str]]:
    """Return the resource names of each living node, by the node's Ray id."""
    nodes = await asyncio.to_thread(ray.nodes)
    return {node["NodeID"]: set(node["Resources"]) for node in nodes if node["Alive"]}


def _ray_id(node_config: NodeConfig, alive: dict[str, set[str]]) -> str | None:
    wanted = {f"{DEVICE_RESOURCE}{device.id}" for device in node_config.devices}
    return next((ray_id for ray_id, resources in alive.items() if wanted <= resources), None)
