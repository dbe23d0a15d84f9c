"""Starts, suspends, stops and observes training groups: a job's ranks, one named detached actor per device.

Only copies on the home node are permanent. Before ranks start on another node, base weights, data and the snapshot to
resume from are copied to it. Every snapshot and published version is copied home as soon as a rank reports it complete,
and recorded only after the copy: a node may die at any time, so home must have everything that is recorded about the
job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError

from runtime.devices.kinds import kind_of
from runtime.errors import SupervisorDied
from scheduler.core.errors import EffectFailed
from scheduler.handover.effects import Detail, GroupEnded, GroupView
from scheduler.ray.actors import IDLE_HUNG_S, RANK, Silent, Supervisor, actor_names, errors_as_failures
from scheduler.ray.node import NodeConfig, stored_bytes
from scheduler.ray.nodes import Nodes
from train.control.group import Group, RankHost
from train.plan.spec import TrainSpec, every_s
from weights.format.names import Name, decode_name

log = logging.getLogger(__name__)

FRESH_S = 10.0  # time limit for replacing a dead supervisor; Ray frees its name within a second
FRESH_EVERY_S = 0.05
_OVER = {"event": "over"}


class Jobs(Protocol):
    """Provides specs for a job's ranks, and receives the ranks' events. The controller's JobRuns documents each
    method."""

    async def prepare(self, job_id: str) -> None: ...

    def spec(self, job_id: str, device_kind: str) -> TrainSpec:
        """Return the spec of the job's ranks. The versions that it names stay in shared memory until `taken`. Raises
        LookupError if the job cannot run any more."""

    def newest_snapshot(self, job_id: str) -> Path | None: ...

    def taken(self, job_id: str) -> None:
        """Called when the job's ranks have read the files of `spec` and `newest_snapshot`, or will not read them."""

    def on_event(self, job_id: str, event: dict[str, Any]) -> None: ...

    async def will_succeed(self, job_id: str) -> None:
        """Called after the last event of its ranks, before the success of the job is reported."""

    def on_stopped(self, job_id: str) -> None: ...


class Groups:
    """Starts, suspends, stops and observes groups."""

    def __init__(self, nodes: Nodes, jobs: Jobs, report_change: Callable[[], None]):
        self._nodes, self._jobs, self._report_change = nodes, jobs, report_change
        self._hosts: dict[str, Supervisor] = {}
        self._groups: dict[str, _RunningGroup] = {}
        self._in_hand: set[str] = set()  # jobs whose ranks a verb is now starting or ending
        self._touched: set[str] = set()  # jobs that verbs handled since the last observation began

    @contextlib.contextmanager
    def _handling(self, job_id: str) -> Iterator[None]:
        """Keep `observe` from adopting a job's ranks while a verb changes them."""
        self._in_hand.add(job_id)
        self._touched.add(job_id)
        try:
            yield
        finally:
            self._in_hand.discard(job_id)

    async def start_group(self, job_id: str, devices: tuple[str, ...], run: str) -> Detail:
        with self._handling(job_id):
            try:
                return await self._start_group(job_id, devices, run)
            finally:
                self._jobs.taken(job_id)

    async def _start_group(self, job_id: str, device_ids: tuple[str, ...], run: str) -> Detail:
        running = self._groups.get(job_id)
        if running is not None and (running.run == run or running.ended is not None):
            return None
        node_config = self._nodes.config_of(device_ids)
        await self._nodes.wait_warm(node_config, "train")
        devices = [self._nodes.device(device_id) for device_id in device_ids]
        try:
            await self._jobs.prepare(job_id)
            spec = self._jobs.spec(job_id, devices[0].kind)
        except LookupError as error:
            raise EffectFailed(str(error)) from error
        snapshot = await asyncio.to_thread(self._jobs.newest_snapshot, job_id)
        read_bytes = await asyncio.to_thread(stored_bytes, snapshot) if snapshot else None
        if node_config.name != self._nodes.home.name:
            spec, snapshot = await outfit(self._nodes, node_config, spec, snapshot)
        living = await asyncio.gather(*(self._living_host(job_id, device_id) for device_id in device_ids))
        group, transfer = self._new_group(job_id, node_config)
        began_s = time.monotonic()
        try:
            addresses = [kind_of(device.kind).address(device.index) for device in devices]
            hosts: list[Any] = [_Host(host) for host in living]
            with errors_as_failures():
                await group.start(spec, hosts, addresses, str(snapshot) if snapshot else None)
        except BaseException:
            if transfer is not None:
                transfer.stop()
            raise
        self._attend(job_id, _RunningGroup(group, run, device_ids, transfer))
        return {
            "seconds": time.monotonic() - began_s,
            "snapshot": snapshot.name if snapshot else None,
            "bytes": read_bytes,
        }

    def _new_group(self, job_id: str, node_config: NodeConfig) -> tuple[Group, ResultTransfer | None]:
        """Return a new group for the job, and a transfer of its results if its node is not home."""
        on_event, transfer = partial(self._jobs.on_event, job_id), None
        if node_config.name != self._nodes.home.name:
            transfer = ResultTransfer(self._nodes, node_config.name, job_id, on_event)
            on_event = transfer.take
        return Group(on_event), transfer

    async def suspend_group(self, job_id: str) -> Detail:
        running = self._groups.get(job_id)
        if running is None:
            return None
        with self._handling(job_id):
            running.leaving = True
            with errors_as_failures():
                report = await running.group.suspend()
            await running.watcher
            if report is None and running.ended is not None and running.ended.outcome == "failed":
                raise EffectFailed(running.ended.error, running.ended.blame)
            if running.ended is not None:  # the group ended before the suspension: the next observation reports the end
                running.devices = ()
                return {"ended": running.ended.outcome}
            self._groups.pop(job_id, None)
            if report is None:
                return None
            return {name: getattr(report, name) for name in ("step", "snapshot_path", "bytes", "seconds")}

    async def stop_group(self, job_id: str) -> Detail:
        with self._handling(job_id):
            running = self._groups.pop(job_id, None)
            if running is not None:
                running.watcher.cancel()
                if running.ended is None:
                    with errors_as_failures():
                        await running.group.kill()
                if running.transfer is not None:
                    running.transfer.stop()
            for device_id, status in (await self._statuses(patient=True)).items():
                if status["job_id"] == job_id:
                    with errors_as_failures():
                        await _Host(self._host(device_id)).kill()
            await self._nodes.release_job(job_id)
            self._jobs.on_stopped(job_id)
            return None

    def _attend(self, job_id: str, running: _RunningGroup) -> None:
        self._groups[job_id] = running
        running.watcher = asyncio.create_task(self._wait_group(job_id, running))

    async def _wait_group(self, job_id: str, running: _RunningGroup) -> None:
        outcome = await running.group.wait()
        missing = "" if running.transfer is None else await running.transfer.over(outcome.outcome == "suspended")
        if outcome.outcome == "suspended":
            if not running.leaving:  # an earlier controller suspended it: its devices are free, the job waits
                self._groups.pop(job_id, None)
                self._report_change()
            return
        if (error := outcome.error) is not None:
            running.ended = GroupEnded("failed", outcome.step, str(error), error.retryable, error.blame)
        elif missing:
            running.ended = GroupEnded("failed", outcome.step, missing)
        else:
            await self._jobs.will_succeed(job_id)
            running.ended = GroupEnded("succeeded", outcome.step)
        self._report_change()

    def _host(self, device_id: str) -> Supervisor:
        """Find or create the supervisor of a device; replace a supervisor that is known to be dead."""
        host = self._hosts.get(device_id)
        if host is None or host.over:
            node_config = self._nodes.config_of((device_id,))
            numa = node_config.numa_nodes([self._nodes.device(device_id)])
            warm, logs = node_config.warm_socket("train"), str(node_config.log_dir)
            actor = self._nodes.here(RankHost, RANK + device_id, node_config, warm, logs, *numa)
            host = self._hosts[device_id] = Supervisor(actor, RANK + device_id)
        return host

    async def _living_host(self, job_id: str, device_id: str) -> Supervisor:
        """Return a device's supervisor that has just answered, because the cached supervisor may be dead."""
        until_s = time.monotonic() + FRESH_S
        while True:
            host = self._host(device_id)
            try:
                async with asyncio.timeout(IDLE_HUNG_S if host.answered else None):
                    await host.call("status")
                host.reported = True
                return host
            except TimeoutError:
                host.kill(f"it did not answer for {IDLE_HUNG_S:.0f} s and was killed")
            except SupervisorDied as error:
                host.end(str(error))
                if time.monotonic() > until_s:
                    raise EffectFailed(str(error), "outside") from error
            await asyncio.sleep(FRESH_EVERY_S)

    async def _statuses(self, *, patient: bool = False) -> dict[str, dict[str, Any]]:
        """Return, by device, the status (RankHost.status) of supervisors that answer. Omit a silent supervisor that has
        reported before unless `patient`; raise EffectFailed for other silent supervisors."""
        device_ids = [name.removeprefix(RANK) for name in await actor_names() if name.startswith(RANK)]
        statuses = await asyncio.gather(*(self._rank(device_id, patient) for device_id in device_ids))
        return {device_id: status for device_id, status in zip(device_ids, statuses, strict=True) if status}

    async def _rank(self, device_id: str, patient: bool) -> dict[str, Any] | None:
        try:
            host = self._host(device_id)
        except EffectFailed:  # its node is gone, with the rank
            return None
        try:
            return await host.status(patient=patient)
        except Silent as error:
            if patient or not host.reported:
                raise
            log.warning("%s", error)  # `_groups` has its world and will report the end
        except (SupervisorDied, RayError):  # its actor died, with the rank on its lifeline
            host.end("it does not report its state")
            if self._hosts.get(device_id) is host:
                del self._hosts[device_id]
        return None

    async def observe_groups(self) -> tuple[GroupView, ...]:
        """Every group that was started and is not cleaned up yet.

        Adopts ranks whose controller died: they continue training if all ranks of their world live, else they end. In
        both cases their events since the death are processed.
        """
        # A world that a verb ends during the reading looks like one without a controller.
        self._touched = set(self._in_hand)
        worlds: dict[str, dict[str, dict[str, Any]]] = {}
        for device_id, status in (await self._statuses()).items():
            if status["job_id"] and status["job_id"] not in self._touched:
                worlds.setdefault(status["job_id"], {})[device_id] = status
        for job_id, statuses in worlds.items():
            if job_id in self._touched or job_id in self._groups:
                continue  # known already, or a verb began in the meantime
            await self._adopt(job_id, statuses)
        return tuple(
            GroupView(job_id, running.devices, ended=running.ended, run=running.run)
            for job_id, running in self._groups.items()
        )

    async def _adopt(self, job_id: str, statuses: dict[str, dict[str, Any]]) -> None:
        log.info("adopted its ranks on %s", ", ".join(sorted(statuses)), extra={"job_id": job_id})
        devices = tuple(sorted(statuses, key=lambda device_id: statuses[device_id]["rank"]))
        group, transfer = self._new_group(job_id, self._nodes.config_of(devices))
        hosts: list[Any] = [_Host(self._host(device_id)) for device_id in devices]
        await group.adopt(job_id, hosts, whole=is_whole(statuses.values()))
        self._attend(job_id, _RunningGroup(group, "", devices, transfer))


@dataclass(slots=True)
class _RunningGroup:
    group: Group
    run: str  # see GroupView
    devices: tuple[str, ...]  # device of each rank; empty if a suspension found it ended
    transfer: ResultTransfer | None = None  # set if the ranks are on another node
    watcher: asyncio.Task | None = None
    ended: GroupEnded | None = None
    leaving: bool = False


def is_whole(statuses: Collection[Mapping[str, Any]]) -> bool:
    """Whether these statuses (RankHost.status) cover all ranks of one world, dead or alive."""
    world = sorted((status["world_size"], status["rank"]) for status in statuses)
    return world == [(len(world), rank) for rank in range(len(world))]


class _Host:
    """Calls a RankHost through its supervisor. The rank dies with the supervisor."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._supervisor.call, method)

    async def kill(self) -> None:
        with contextlib.suppress(SupervisorDied):
            await self._supervisor.call("kill")


async def outfit(
    nodes: Nodes, node_config: NodeConfig, spec: TrainSpec, snapshot: Path | None
) -> tuple[TrainSpec, Path | None]:
    """Copy the job's files to this node; return the spec for ranks there and the path of the job's snapshot. Raises
    EffectFailed.
    """
    job_id = spec.job_id

    async def bring(path: str, purpose: str) -> str:
        return str(await nodes.bring(node_config, Path(path), f"job {job_id} {purpose}"))

    folder = await nodes.bring_job(node_config.name, Path(spec.run_dir))
    there = replace(
        spec,
        base_path=await bring(spec.base_path, "base"),
        base_adapter=None if spec.base_adapter is None else await bring(spec.base_adapter, "adapter"),
        train_path=str(folder / Path(spec.train_path).name),
        valid_path=None if spec.valid_path is None else str(folder / Path(spec.valid_path).name),
        run_dir=str(folder),
        shm_root=str(node_config.shm_root),
        shm_budget_bytes=node_config.budget_bytes,
    )
    return there, None if snapshot is None else Path(await bring(str(snapshot), "snapshot"))


class ResultTransfer:
    """Forwards events of a job's remote ranks in order, each after its snapshot or version has been copied home."""

    def __init__(
        self,
        nodes: Nodes,
        node: str,
        job_id: str,
        on_event: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._nodes, self._node, self._job_id, self._on_event = nodes, node, job_id, on_event
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._missing = ""
        self._clock = clock
        self._not_before_s = 0.0
        self._pending: dict[str, Any] | None = None  # the newest snapshot not yet copied home
        self._transfer = asyncio.create_task(self._run(), name=f"{job_id} result transfer")

    def take(self, event: dict[str, Any]) -> None:
        self._events.put_nowait(event)

    async def over(self, suspended: bool) -> str:
        """Forward the last events after the ranks have ended. Returns "", or a sentence about a result that was not
        copied.

        The ranks' node then frees their files, except the folder and snapshots of a suspended job, which speed up a
        return to this node.
        """
        self._events.put_nowait(_OVER)
        await asyncio.wait({self._transfer})
        if (error := self._transfer.exception()) is not None:
            return f"an event of its ranks could not be processed: {error!r}"
        if not self._missing:
            with contextlib.suppress(EffectFailed):  # the node is gone, with its files
                await self._nodes.on(self._node, "forget_job", self._job_id, suspended)
        return self._missing

    def stop(self) -> None:
        self._transfer.cancel()

    async def _run(self) -> None:
        while True:
            event = await self._events.get()
            if event["event"] == "snapshot":
                self._pending = event
                if self._clock() >= self._not_before_s:
                    await self._bring_pending()
            elif event is _OVER:
                return await self._bring_pending()
            elif event["event"] != "published":
                self._on_event(event)
            elif (path := await self._bring(event)) is not None:
                self._on_event({**event, "path": str(path)})

    async def _bring_pending(self) -> None:
        event, self._pending = self._pending, None
        if event is None:
            return
        began_s = self._clock()
        path = await self._bring(event)
        self._not_before_s = self._clock() + every_s(self._clock() - began_s)
        if path is not None:
            self._on_event({**event, "path": str(path)})

    async def _bring(self, event: dict[str, Any]) -> Path | None:
        remote, ids = Path(event["path"]), {"job_id": self._job_id, "node": self._node}
        try:
            path = await self._nodes.bring_home(self._node, name_at(remote), remote)
        except EffectFailed as error:
            # For a snapshot, a newer one will follow or an older one serves. A published result exists only once.
            log.error("%s of step %s not copied home: %s", event["event"], event.get("step"), error.reason, extra=ids)
            if event["event"] == "published":
                self._missing = f"its version {event['version']} was not copied home: {error.reason}"
            return None
        log.info("%s of step %s copied home", event["event"], event.get("step"), extra=ids)
        return path


def name_at(path: Path) -> Name:
    """Return the name of the version at `path` in a store (see weights.format.names.Name.key)."""
    model, version = decode_name(path.parent.name), decode_name(path.name)
    assert model is not None and version is not None, path
    return Name(path.parent.parent.name.removesuffix("s"), model, version)
