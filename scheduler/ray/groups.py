"""Starts, suspends, stops and observes training groups: a job's ranks, one named detached actor per device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError

from runtime.devices.kinds import kind_of
from runtime.errors import SupervisorDied
from scheduler.core.errors import EffectFailed
from scheduler.handover.effects import Detail, GroupEnded, GroupView
from scheduler.ray.actors import IDLE_HUNG_S, RANK, Silent, Supervisor, actor_names, ask, find_actor
from scheduler.ray.node import NodeConfig, stored_bytes
from scheduler.ray.nodes import Nodes, OnDeath
from scheduler.ray.remote_jobs import ResultTransfer, outfit
from train.control.group import Group
from train.control.rank_host import RankHost
from train.plan.spec import TrainSpec

log = logging.getLogger(__name__)

FRESH_S = 10.0  # limit for replacing dead supervisors; Ray frees a dead one's name within a second
FRESH_EVERY_S = 0.05


class Jobs(Protocol):
    """The work of a job's ranks, and the receiver of their events."""

    async def catch_up(self, job_id: str) -> None:
        """Process what earlier ranks of the job did while no controller listened."""

    async def prepare(self, job_id: str) -> None:
        """Load what `spec` will name. Raises LookupError."""

    def spec(self, job_id: str, device_kind: str) -> TrainSpec:
        """The work of the job's ranks. Versions in shared memory that it names stay there until `taken`. Raises
        LookupError if it cannot run any more."""

    def newest_snapshot(self, job_id: str) -> Path | None:
        """The newest snapshot that can be resumed from, in shared memory; it stays there until `taken`."""

    def taken(self, job_id: str) -> None:
        """Called when the job's ranks have read what `spec` and `newest_snapshot` named, or will not."""

    def on_event(self, job_id: str, event: dict[str, Any]) -> None:
        """Called for each event of the job's ranks, see train.control.group."""

    async def will_succeed(self, job_id: str) -> None:
        """Called when all events of its ranks were taken, before the success of a job is reported."""

    def on_stopped(self, job_id: str) -> None:
        """Called when the job's ranks were ended by force."""


class Groups:
    """The verbs on groups, and the observation of groups. on_death: called for a rank that died of its device."""

    def __init__(
        self,
        nodes: Nodes,
        jobs: Jobs,
        report_change: Callable[[], None],
        on_death: OnDeath = lambda device_ids, holder, reason: None,
    ):
        self._nodes, self._jobs, self._report_change, self._on_death = nodes, jobs, report_change, on_death
        self._hosts: dict[str, Supervisor] = {}
        self._groups: dict[str, _RunningGroup] = {}
        self._in_hand: set[str] = set()  # jobs whose ranks a verb is starting or ending
        self._touched: set[str] = set()  # jobs in hand since the last observation began

    @contextlib.contextmanager
    def _handling(self, job_id: str) -> Iterator[None]:
        """While a verb changes a job's ranks, `observe` does not adopt them."""
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
            await self._jobs.catch_up(job_id)
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
            hosts = [_Host(host) for host in living]
            await ask(group.start(spec, hosts, addresses, str(snapshot) if snapshot else None))
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
        """A group for the job, and what brings the results of its ranks home from another node."""
        tell, transfer = partial(self._jobs.on_event, job_id), None
        if node_config.name != self._nodes.home.name:
            transfer = ResultTransfer(self._nodes, node_config.name, job_id, tell)
            tell = transfer.take
        return Group(tell), transfer

    async def suspend_group(self, job_id: str) -> Detail:
        running = self._groups.get(job_id)
        if running is None:
            return None
        with self._handling(job_id):
            running.leaving = True
            report = await ask(running.group.suspend())
            await running.watcher
            if report is None and running.ended is not None and running.ended.outcome == "failed":
                raise EffectFailed(running.ended.error, running.ended.blame)
            if running.ended is not None:  # before it could be suspended: the next observation reports it
                running.devices = ()
                return {"ended": running.ended.outcome}
            self._groups.pop(job_id, None)
            return asdict(report) if report is not None else None

    async def stop_group(self, job_id: str) -> Detail:
        with self._handling(job_id):
            running = self._groups.pop(job_id, None)
            if running is not None:
                running.watcher.cancel()
                if running.ended is None:
                    await ask(running.group.kill())
                if running.transfer is not None:
                    running.transfer.stop()
            for device_id, status in (await self._statuses(patient=True)).items():
                if status["job_id"] == job_id:
                    await ask(_Host(self._host(device_id)).kill())
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
        error = outcome.error or {}
        if missing and outcome.outcome == "succeeded":
            outcome, error = replace(outcome, outcome="failed"), {"message": missing}
        if outcome.outcome == "succeeded":
            await self._jobs.will_succeed(job_id)
        running.ended = GroupEnded(
            outcome.outcome,
            outcome.step,
            error.get("message", ""),
            error.get("retryable", True),
            error.get("blame", "own"),
        )
        self._report_change()
        # Only after reporting the end: whatever fails below, the job's end is recorded.
        if error.get("by_device"):
            device_id = running.devices[error["rank"]]
            if find_actor(RANK + device_id) is not None:  # else its node is gone, not the device at fault
                self._on_death((device_id,), f"job {job_id}", error["reason"])

    def _host(self, device_id: str) -> Supervisor:
        """The supervisor of a device, found or created, but never one known to be dead."""
        known = self._hosts.get(device_id)
        if known is None or known.over:
            node_config = self._nodes.config_of((device_id,))
            numa = node_config.numa_nodes([self._nodes.device(device_id)])
            warm, logs = node_config.warm_socket("train"), str(node_config.log_dir)
            actor = self._nodes.here(RankHost, RANK + device_id, node_config, warm, logs, *numa)
            known = self._hosts[device_id] = Supervisor(actor, RANK + device_id)
        return known

    async def _living_host(self, job_id: str, device_id: str) -> Supervisor:
        """A device's supervisor that has just answered: the cached handle may be that of a dead one."""
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
        """By device, the status (RankHost.status) of supervisors that answer. A silent one is left out if it reported
        before and `patient` is not set; otherwise EffectFailed."""
        device_ids = [name.removeprefix(RANK) for name in await actor_names() if name.startswith(RANK)]
        statuses = await asyncio.gather(*(self._rank(device_id, patient) for device_id in device_ids))
        return {device_id: status for device_id, status in zip(device_ids, statuses, strict=True) if status}

    async def _rank(self, device_id: str, patient: bool) -> dict[str, Any] | None:
        try:
            host = self._host(device_id)
        except EffectFailed:  # its node is gone, and the rank with it
            return None
        try:
            return await host.status(patient=patient)
        except Silent as error:
            if patient or not host.reported:
                raise
            log.warning("%s", error)  # `_groups` has its world and reports its end
        except (SupervisorDied, RayError):  # its actor died, and with it the rank on its lifeline
            host.end("it does not report its state")
            if self._hosts.get(device_id) is host:
                del self._hosts[device_id]
        return None

    async def observe_groups(self) -> tuple[GroupView, ...]:
        """Every group with a living rank, and groups that ended but are not cleaned up yet.

        If all ranks of a world whose controller died are there, this adopts them and they go on training.
        """
        # A world that a verb ended during the reading looks as if it had lost its controller.
        self._touched = set(self._in_hand)
        worlds: dict[str, dict[str, dict[str, Any]]] = {}
        for device_id, status in (await self._statuses()).items():
            if status["job_id"] and status["job_id"] not in self._touched:
                worlds.setdefault(status["job_id"], {})[device_id] = status
        views: dict[str, GroupView] = {}
        for job_id, statuses in worlds.items():
            if job_id in self._touched or job_id in self._groups:
                continue  # known, or a verb began in the meantime
            if is_whole(statuses.values()):
                await self._adopt(job_id, statuses)
            elif any(status["alive"] for status in statuses.values()):
                # The world was starting or dying: end it, and the job resumes from its snapshot.
                why = "the controller restarted while the ranks were starting"
                lost = GroupEnded("failed", 0, why, blame="outside")
                views[job_id] = GroupView(job_id, tuple(statuses), ended=lost)
        for job_id, running in self._groups.items():
            views[job_id] = GroupView(job_id, running.devices, ended=running.ended, run=running.run)
        return tuple(views.values())

    async def _adopt(self, job_id: str, statuses: dict[str, dict[str, Any]]) -> None:
        ids = {"job_id": job_id}
        log.info("adopted its running ranks on %s", ", ".join(sorted(statuses)), extra=ids)
        try:
            await self._jobs.catch_up(job_id)
        except LookupError as error:
            log.warning("cannot read the progress made without a controller: %s", error, extra=ids)
        devices = tuple(sorted(statuses, key=lambda device_id: statuses[device_id]["rank"]))
        group, transfer = self._new_group(job_id, self._nodes.config_of(devices))
        await group.adopt(job_id, [_Host(self._host(device_id)) for device_id in devices])
        self._attend(job_id, _RunningGroup(group, "", devices, transfer))


@dataclass(slots=True)
class _RunningGroup:
    group: Group
    run: str  # see GroupView
    devices: tuple[str, ...]  # device of each rank; none once they left
    transfer: ResultTransfer | None = None  # set if the ranks are on another node
    watcher: asyncio.Task | None = None
    ended: GroupEnded | None = None
    leaving: bool = False


def is_whole(statuses: Collection[Mapping[str, Any]]) -> bool:
    """Whether these ranks (see RankHost.status) are all ranks of one world, each alive or done."""
    sizes = {status["world_size"] for status in statuses}
    ranks = sorted(status["rank"] for status in statuses)
    return (
        len(sizes) == 1
        and ranks == list(range(sizes.pop()))
        and all(status["alive"] or status["done"] for status in statuses)
    )


class _Host:
    """A RankHost behind its supervisor. The rank dies with the supervisor."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._supervisor.call, method)

    async def kill(self) -> None:
        with contextlib.suppress(SupervisorDied):
            await self._supervisor.call("kill")
