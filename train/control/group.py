"""Runs all ranks of a job as one group: starts, watches and stops them together.

Events handed to `on_event` (all have "event" and "job"):
  message     level, text
  started     step, devices, seconds {start, join, prepare}
  metrics     step, total_steps, epoch, loss, grad_norm, learning_rate, tokens_per_s, tokens, devices,
              rank_seconds (of each rank: train.trainer.metrics)
  validation  step, loss
  snapshot    step, path, bytes, seconds (training stood still)
  published   version, path, step, epoch, bytes, seconds
  policy      step: the weights after it are in shared memory, for samples (train.rollouts.rollouts)
  finished    outcome, step, error

Rules
- A failure of one rank (death, exception, silence, a phase that does not end) kills all of them, because the others
  would wait in a collective for ever.
- The group repairs nothing. The outcome says whether a restart from the newest snapshot can help.

`RankHost` supervises one of the ranks, in a Ray actor: it holds the device, has the rank forked, forwards calls and
events. If its caller dies, another one may take over: it keeps events until a caller has acknowledged them, and those
that report the rank's state (`STATES`) for the rank's life, so that a new caller can read from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from runtime.devices.kinds import kind_of
from runtime.errors import ChildDied, ChildTimeout, RuntimeLayerError
from runtime.processes.child import Child
from runtime.processes.kernel import DiesAs, group_dies_as, life
from train.plan import errors
from train.plan.errors import RankFailed
from train.plan.spec import TrainSpec

log = logging.getLogger(__name__)

ENTRY = "train.trainer.worker:main"
STATES = ("ready", "done", "fatal", "ended")
NOWHERE = {"job_id": "", "rank": 0, "world_size": 0}
WORLDS = "worlds"  # alongside the warm parent's socket, in a directory of the box's user alone
# Exceptions that mean "another rank is gone": never the root cause.
_SYMPTOMS = ("DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError", "ConnectionError")
_CERTAIN, _RAISED, _STARVED, _DIED, _SYMPTOM = range(5)
_GRACE_S = 2.0
"""Time for the others to report after one rank has failed: they raise from their collectives within 0.1 s, sometimes
before its death is seen. Thus the rank with its own error is blamed, and the first can report a snapshot."""


@dataclass(frozen=True)
class PingLimits:
    """When a rank counts as hung. A separate thread answers `ping`, so silence means that the process is stopped; but
    a library may hold Python's lock for seconds, as torch does while a device begins."""

    ping_every_s: float = 1.0
    ping_timeout_s: float = 5.0
    long_ping_timeout_s: float = 60.0  # until it is ready
    phase_limit_s: float = 900.0  # of one micro-batch, one validation, one tokenisation ...


@dataclass(frozen=True)
class Outcome:
    """How a group ended. `error` is {"code", "message", "retryable", "blame", "rank", "reason"} when failed. blame:
    "own" if a rank raised an error, "memory" if the OOM killer killed it, else "outside": it was killed, stopped, or
    its supervisor died, which is not a fault of the job.

    Of a suspension: `snapshot_path` is None if the job had not done a step yet; `bytes` of the snapshot; seconds: agree
    (until the step is done or aborted), snapshot, exit (the rest until the devices are free), total.
    """

    outcome: Literal["succeeded", "failed", "suspended"]
    step: int = 0
    error: dict[str, Any] | None = None
    snapshot_path: str | None = None
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _Failed(Exception):
    """How a world failed. order: the lower, the nearer to the cause. error: what differs of `Outcome.error` from a
    failure that is not the job's and can be retried."""

    def __init__(self, rank: int, reason: str, order: int = _CERTAIN, **error: Any):
        usual = {"code": "rank_failed", "message": f"rank {rank} {reason}", "retryable": True, "blame": "outside"}
        self.error, self.order = usual | {"rank": rank, "reason": reason} | error, order


class Group:
    """One world of one job, for one use: create another Group to continue the job.

    `_follow` has its life from the first event of its ranks to the end of all of them.
    """

    def __init__(
        self,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        limits: PingLimits | None = None,
    ):
        self._on_event, self._limits = on_event, limits or PingLimits()
        self._hosts: list[RankHost] = []
        self._job_id = ""
        self._step = 0
        self._listeners: list[asyncio.Task[None]] = []
        self._ready: dict[int, dict[str, Any]] = {}
        self._done: dict[str, Any] = {}  # of the first rank
        self._left_s = 0.0  # time.monotonic() then
        self._killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self._following: asyncio.Task[Outcome] | None = None
        self._started_s: float | None = None  # of a world that was not adopted

    async def start(
        self, spec: TrainSpec, hosts: Sequence[RankHost], devices: Sequence[str], snapshot: str | None = None
    ) -> None:
        """Fork one rank per host, and return when all are training. `devices[i]` is the address of a device
        (DeviceKind.address).

        Raises RankFailed if the world does not come up; nothing is left running then.
        """
        assert len(hosts) == len(devices) and hosts, "one device per host"
        self._started_s = time.monotonic()
        self._hosts, self._job_id = list(hosts), spec.job_id
        meeting, fields = uuid.uuid4().hex, asdict(spec)
        starts = [
            host.start(fields, rank, len(hosts), meeting, device, snapshot)
            for rank, (host, device) in enumerate(zip(hosts, devices, strict=True))
        ]
        for rank, result in enumerate(await asyncio.gather(*starts, return_exceptions=True)):
            if isinstance(result, BaseException):
                await self._kill_all()
                raise RankFailed(rank, f"was not started: {result}", retryable=True, blame="outside") from result
        self._following = asyncio.create_task(self._follow(), name=f"{self._job_id} ranks")
        while len(self._ready) < len(hosts) and not self._following.done():
            await asyncio.wait([self._following], timeout=0.01)
        if self._following.done() and (error := self._following.result().error) is not None:
            raise RankFailed(error["rank"], error["reason"], retryable=error["retryable"], blame=error["blame"])

    async def adopt(self, job_id: str, hosts: Sequence[RankHost], *, whole: bool = True) -> None:
        """Take over the ranks of another Group whose process died, dead ones too, in the order of ranks. whole: whether
        these are all; else it ends them.

        It delivers unacknowledged events now, the last of them perhaps a second time.
        """
        self._hosts, self._job_id = list(hosts), job_id
        if not whole:
            self._killed.set_result("belongs to a world of which other ranks are missing")
        self._following = asyncio.create_task(self._follow(), name=f"{self._job_id} ranks")

    async def suspend(self) -> Outcome | None:
        """Abort the step under way and leave the devices with a snapshot of the state before it; returns when they
        are free.

        None if the job ended otherwise meanwhile (it was in its last step, or failed): `wait` returns how.
        """
        started = time.monotonic()
        assert self._following is not None, "start the group first"
        if not self._following.done():
            with suppress(RuntimeLayerError):  # the rank has just died; its listener ends the group
                await self._hosts[0].call("suspend")
        outcome = await self.wait()
        if outcome.outcome != "suspended":
            return None
        total, snapshot = time.monotonic() - started, outcome.seconds["snapshot"]
        # Its "leave" is all the time of rank 0 between the step boundary and its last message, snapshot included.
        agree = max(0.0, self._left_s - started - outcome.seconds["leave"])
        seconds = {"agree": agree, "snapshot": snapshot, "exit": total - agree - snapshot, "total": total}
        return replace(outcome, seconds=seconds)

    async def kill(self) -> Outcome:
        """End now, as a failure that can be retried (the devices are needed, or the box goes down)."""
        if not self._killed.done():
            self._killed.set_result("was killed on request")
        return await self.wait()

    async def wait(self) -> Outcome:
        """How the group ended; returns when no process of it is left."""
        assert self._following is not None, "start the group first"
        return await asyncio.shield(self._following)

    async def _follow(self) -> Outcome:
        """Listen to all ranks until all are done, or one fails; then kill what is left of them, and take the events
        that they had emitted by then: no later group reads them."""
        ranks = range(len(self._hosts))
        self._listeners = [asyncio.create_task(self._listen(rank)) for rank in ranks]
        watchers = [asyncio.create_task(self._watch(rank)) for rank in ranks]
        try:
            error = await self._failure(watchers)
            for watcher in watchers:
                watcher.cancel()
            if killed := await self._kill_all():
                await asyncio.wait([self._listeners[rank] for rank in killed])
        finally:
            for task in (*self._listeners, *watchers):
                task.cancel()
        await asyncio.gather(*self._listeners, *watchers, return_exceptions=True)
        fields: dict[str, Any] = {"outcome": "failed", "step": self._step, "error": error} if error else self._done
        outcome = Outcome(**fields)
        self._report("finished", outcome=outcome.outcome, step=outcome.step, error=outcome.error)
        return outcome

    async def _failure(self, watchers: Sequence[asyncio.Task[None]]) -> dict[str, Any] | None:
        """Wait until a rank fails and return the error, or None once all are done."""
        pending: set[asyncio.Future[Any]] = {*self._listeners, *watchers, self._killed}
        try:
            while not all(listener.done() for listener in self._listeners):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if self._killed in done:
                    raise _Failed(0, self._killed.result(), code="killed")
                for task in done:
                    task.result()
        except _Failed as failed:
            if failed.order == _CERTAIN:
                return failed.error
            ended, _ = await asyncio.wait(self._listeners, timeout=_GRACE_S)
            failures = [failed, *(task.exception() for task in self._listeners if task in ended)]  # it wins a tie
            return min((error for error in failures if isinstance(error, _Failed)), key=lambda error: error.order).error
        except Exception as error:  # whatever it is: without an end, nobody would start the job again
            log.exception("its ranks cannot be followed", extra={"job_id": self._job_id})
            return _Failed(0, f"could not be followed: {error!r}").error
        return None

    async def _listen(self, rank: int) -> None:
        """Take the events of a rank until it is done. Raises _Failed."""
        acknowledged = 0
        while True:
            try:
                event = await self._hosts[rank].next_event(acknowledged)
            except RuntimeLayerError as error:  # its supervisor is gone
                raise _Failed(rank, f"died: {error}", _DIED) from error
            acknowledged = event.pop("number")
            match event.pop("event"):
                case "done":
                    if rank == 0:
                        self._done, self._left_s = event, time.monotonic()
                    return
                case "fatal":
                    raise _raised(rank, event["type"], event["message"])
                case "ended" if event["starved"]:
                    raise _Failed(rank, "died: the host's memory ran out", _STARVED, blame="memory")
                case "ended":
                    raise _Failed(rank, f"died: it {event['how']}", _DIED)
                case name:
                    try:
                        self._take(rank, name, event)
                    except Exception as error:  # it must not be lost silently, with all later ones
                        raise _Failed(rank, f"sent an event that could not be handled: {error!r}") from error

    def _take(self, rank: int, name: str, event: dict[str, Any]) -> None:
        if name != "ready":
            self._step = event.get("step", self._step)
            self._report(name, **event)
            return
        self._ready[rank] = event
        if len(self._ready) == len(self._hosts) and self._started_s is not None:
            seconds = {key: max(ready["seconds"][key] for ready in self._ready.values()) for key in ("join", "prepare")}
            seconds["start"] = time.monotonic() - self._started_s
            self._step = self._ready[0]["step"]
            self._report("started", step=self._step, devices=len(self._hosts), seconds=seconds)

    async def _watch(self, rank: int) -> None:
        """Raises _Failed once a rank is silent, or too long in one phase."""
        limits = self._limits
        while True:
            await asyncio.sleep(limits.ping_every_s)
            timeout_s = limits.ping_timeout_s if rank in self._ready else limits.long_ping_timeout_s
            try:
                report = await self._hosts[rank].call("ping", timeout_s=timeout_s)
            except ChildTimeout as error:
                why = f"did not answer within {timeout_s} s (stopped or starved)"
                raise _Failed(rank, why, code="rank_hung") from error
            except RuntimeLayerError:
                return  # its listener knows the cause
            if report["phase"] != "done" and report["in_phase_s"] > limits.phase_limit_s:
                where = f"hangs in phase {report['phase']!r} at step {report['step']}"
                raise _Failed(rank, f"{where} for {report['in_phase_s']:.0f} s", code="rank_hung")

    def _report(self, event: str, **data: Any) -> None:
        self._on_event({"event": event, **data, "job": self._job_id})

    async def _kill_all(self) -> list[int]:
        """Kill all ranks; returns those whose supervisors did. An unreachable one must not block the report of the
        group's end: its rank died with it. Such an error once left a suspend waiting for ever."""
        failures = await asyncio.gather(*(host.kill() for host in self._hosts), return_exceptions=True)
        for rank, error in enumerate(failures):
            if error is not None:
                log.warning("rank %d could not be killed: %s", rank, error, extra={"job_id": self._job_id})
        return [rank for rank, error in enumerate(failures) if error is None]


def _raised(rank: int, kind: str, message: str) -> _Failed:
    error = {"code": kind, "blame": "own"}
    if isinstance(getattr(errors, kind, None), type):  # of the input, in words for who gave it
        error |= {"retryable": False, "message": message}
    return _Failed(rank, f"raised {kind}: {message}", _SYMPTOM if kind in _SYMPTOMS else _RAISED, **error)


class RankHost:
    """One rank at a time, forked from the warm parent at `warm_socket`, logging into `log_dir`. `numa_node`: that of
    the device, on which ranks run; None: anywhere.
    """

    def __init__(self, warm_socket: str, log_dir: str, numa_node: int | None = None):
        self._warm_socket, self._log_dir, self._numa_node = warm_socket, Path(log_dir), numa_node
        # Ranks of a world find each other by a file there: torch's default, a port, accepts connections from anyone.
        self._worlds = Path(warm_socket).with_name(WORLDS)
        self._meeting: Path | None = None
        self._child: Child | None = None
        self._place: dict[str, Any] = dict(NOWHERE)
        self._events = _Events()

    async def start(
        self,
        spec: dict[str, Any],
        rank: int,
        world_size: int,
        meeting: str,
        device: str,
        snapshot: str | None = None,
    ) -> None:
        """Fork the rank and return as soon as the process exists; it joins the world by itself. Raises WarmParentError.

        device: its address (DeviceKind.address). meeting: the name of this world and of no other; its ranks are all on
        this node.
        """
        await self.kill()
        self._place = {"job_id": spec["job_id"], "rank": rank, "world_size": world_size}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._meeting = self._worlds / meeting
        self._worlds.mkdir(mode=0o700, exist_ok=True)
        env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        # A world is on one node. By default collectives use an address that other machines can reach.
        env["GLOO_SOCKET_IFNAME"] = "lo"
        kind = kind_of(spec["device_kind"])
        # Set after the fork: the parent never touched a device.
        env |= kind.visibility([device])
        arguments = {"spec": spec, "rank": rank, "world_size": world_size, "snapshot": snapshot}
        self._child = await Child.spawn(
            self._warm_socket,
            ENTRY,
            {**arguments, "meeting": str(self._meeting)},
            env=env,
            numa_nodes=[self._numa_node],
            name=f"{spec['job_id']} rank {rank}",
            log_path=self._log_dir / f"{spec['job_id']}-rank{rank}.log",
        )
        group_dies_as(DiesAs.RANK, self._child.pid)
        self._events = _Events(self._child)

    async def life(self) -> dict[str, Any]:
        """The life of this supervisor, see runtime.processes.kernel.life; also asked to see whether it lives."""
        return life()

    async def status(self) -> dict[str, Any]:
        """`{"job_id", "rank", "world_size"}` of the rank started last, dead or alive. The job is "" before the first
        rank, and again once `kill` has cleared the device."""
        return self._place

    async def call(self, method: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Call the rank; raises ChildDied, ChildError, ChildTimeout."""
        return await self._started().call(method, timeout_s=timeout_s, **args)

    async def next_event(self, after: int = 0) -> dict[str, Any]:
        """The rank's first event with a "number" above `after`, which acknowledges all up to there; the last is "ended"
        (starved: the host's memory ran out; how). The call may be repeated, as after a lost answer."""
        self._started()
        return await self._events.next(after)

    async def kill(self) -> None:
        """Kill the rank if there is one and return when its device is free.

        On a fully loaded machine the kernel takes longer than the wait to free its memory. Giving up then left a
        finished job running for ever.
        """
        # Belongs to this life: the next one may begin while this call still waits.
        child, meeting, place = self._child, self._meeting, self._place
        while child is not None:
            try:
                await child.kill_and_wait()
                break
            except TimeoutError:
                log.warning("%s (pid %d) was killed but has not ended yet; still waiting", child.name, child.pid)
        if meeting is not None:
            meeting.unlink(missing_ok=True)
        if self._place is place:
            self._place = dict(NOWHERE)

    def _started(self) -> Child:
        if self._child is None:
            raise ChildDied("rank", 0, str(self._log_dir), "it was never started")
        return self._child


class _Events:
    """The numbered events of one rank."""

    def __init__(self, child: Child | None = None):
        self._kept: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(child), name=f"events of {child.name}") if child else None

    async def next(self, after: int) -> dict[str, Any]:
        async with self._news:
            while True:
                self._kept = [event for event in self._kept if event["number"] > after or event["event"] in STATES]
                for event in self._kept:
                    if event["number"] > after:
                        return dict(event)
                await self._news.wait()

    async def _read(self, child: Child) -> None:
        for number in count(1):
            event = await child.next_event()
            async with self._news:
                ended = {"event": "ended", "starved": child.starved, "how": child.how_it_ended()}
                self._kept.append({**(event or ended), "number": number})
                self._news.notify_all()
            if event is None:
                return
