"""Runs all ranks of a job as one group: starts, watches and stops them together.

Events for `on_event` (all have "event" and "job"):
  message     level, text
  started     step
  metrics     step, total_steps, epoch, loss, grad_norm, learning_rate, tokens_per_s, tokens, devices,
              rank_seconds (seconds in forward passes, by rank)
  validation  step, loss
  snapshot    step, path, bytes, seconds (that training waited for it)
  published   version, path, step, epoch, bytes, seconds
  policy      step (weights of this step are in shared memory, for train.rollouts.rollouts)
  finished    outcome, step

Rules
- A failure of one rank (death, exception, silence, an endless phase) kills all ranks, because the others would wait in
  a collective for ever.
- The group repairs nothing. The outcome says whether a restart from the newest snapshot can help.

`RankHost`, a Ray actor, supervises one rank: it holds the device, has the rank forked, kills a hung rank, and passes on
the rank's events. If its caller dies, another caller may take over: the host keeps each event until a caller has
acknowledged it, and events of the rank's state (`STATES`) until the rank ends, so a new caller can read from the start.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
STATES = ("ready", "done", "fatal", "hung", "ended")
NOWHERE = {"job_id": "", "rank": 0, "world_size": 0}
WORLDS = "worlds"  # a private folder in the directory of the warm parent's socket
# Exceptions that mean "another rank is gone"; these are never the cause of a failure.
_SYMPTOMS = ("DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError", "ConnectionError")
_GRACE_S = 2.0
"""Time for the other ranks to report after one has failed: they raise from their collectives within 0.1 s, sometimes
before its death is noticed. So the rank with an error of its own is blamed, and rank 0 can still report a snapshot."""


@dataclass(frozen=True)
class PingLimits:
    """Limits after which a rank counts as hung. A thread of its own answers `ping`, so only a stopped process is
    silent; but a library may hold Python's lock for seconds, as torch does when it initialises a device."""

    ping_every_s: float = 1.0
    ping_timeout_s: float = 5.0
    long_ping_timeout_s: float = 60.0  # the ping timeout until the rank is ready
    phase_limit_s: float = 900.0  # longest time for a micro-batch, a snapshot, loading the model ...


@dataclass(frozen=True)
class Outcome:
    """How a group ended. error: why the group failed, if it failed.

    Other fields describe a suspension. snapshot_path: None if the job had done no step. bytes: size of the snapshot.
    seconds: agree (until the step is done or aborted), snapshot, exit (until the devices are free), total.
    """

    outcome: Literal["succeeded", "failed", "suspended"]
    step: int = 0
    error: RankFailed | None = None
    snapshot_path: str | None = None
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Group:
    """One world of a job's ranks. To resume the job, create another Group.

    `_follow` runs from the first event of the ranks until all ranks have ended.
    """

    def __init__(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None):
        self._on_event = on_event
        self._hosts: list[RankHost] = []
        self._job_id = ""
        self._step = 0
        self._ready: set[int] = set()  # ranks
        self._done: dict[str, Any] = {}  # the "done" event of the first rank
        self._left_s = 0.0  # time.monotonic() when the first rank was done
        self._killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # result: why it was killed
        self._following: asyncio.Task[Outcome] | None = None
        self._adopted = False

    async def start(
        self, spec: TrainSpec, hosts: Sequence[RankHost], devices: Sequence[str], snapshot: str | None = None
    ) -> None:
        """Fork one rank per host, and return when all are ready to train. devices: addresses (DeviceKind.address).

        Raises RankFailed if the world does not start; then no rank is running.
        """
        assert len(hosts) == len(devices) and hosts, "one device per host"
        self._hosts, self._job_id = list(hosts), spec.job_id
        meeting, fields = uuid.uuid4().hex, asdict(spec)
        starts = [
            host.start(fields, rank, len(hosts), meeting, device, snapshot)
            for rank, (host, device) in enumerate(zip(hosts, devices, strict=True))
        ]
        for rank, result in enumerate(await asyncio.gather(*starts, return_exceptions=True)):
            if isinstance(result, BaseException):
                await self._kill_all()
                raise RankFailed(rank, f"was not started: {result}") from result
        self._following = asyncio.create_task(self._follow(), name=f"{self._job_id} ranks")
        while len(self._ready) < len(hosts) and not self._following.done():
            await asyncio.wait([self._following], timeout=0.01)
        if self._following.done() and (error := self._following.result().error) is not None:
            raise error

    async def adopt(self, job_id: str, hosts: Sequence[RankHost], *, whole: bool = True) -> None:
        """Take over the ranks of a Group whose process died. Events that were not acknowledged are delivered now, the
        last event perhaps twice.

        Args:
            hosts: the hosts of all ranks in order, those of dead ranks too.
            whole: False if ranks of the world are missing; then the remaining ranks are killed.
        """
        self._hosts, self._job_id, self._adopted = list(hosts), job_id, True
        if not whole:
            self._killed.set_result("belongs to a world of which other ranks are missing")
        self._following = asyncio.create_task(self._follow(), name=f"{self._job_id} ranks")

    async def suspend(self) -> Outcome | None:
        """Abort the current step, write a snapshot of the state before it, and return when the devices are free.

        Return None if the job ended in another way meanwhile (after its last step, or by a failure), as `wait` reports.
        """
        started = time.monotonic()
        assert self._following is not None, "start the group first"
        if not self._following.done():
            with suppress(RuntimeLayerError):  # the rank has just died; its listener ends the group
                await self._hosts[0].suspend()
        outcome = await self.wait()
        if outcome.outcome != "suspended":
            return None
        total, snapshot = time.monotonic() - started, outcome.seconds["snapshot"]
        # "leave": seconds from rank 0's last step to its last message; they include the snapshot.
        agree = max(0.0, self._left_s - started - outcome.seconds["leave"])
        seconds = {"agree": agree, "snapshot": snapshot, "exit": total - agree - snapshot, "total": total}
        return replace(outcome, seconds=seconds)

    async def kill(self) -> Outcome:
        """Kill all ranks now (devices are needed, or the box stops). The outcome is a failure that can be retried."""
        if not self._killed.done():
            self._killed.set_result("was killed on request")
        return await self.wait()

    async def wait(self) -> Outcome:
        """Wait until no process of the group is left; return how it ended."""
        assert self._following is not None, "start the group first"
        return await asyncio.shield(self._following)

    async def _follow(self) -> Outcome:
        """Listen to all ranks until all are done or one fails; then kill the remaining ranks, and handle the events
        that these sent before, because no later group reads those events."""
        listeners = [asyncio.create_task(self._listen(rank)) for rank in range(len(self._hosts))]
        try:
            error = await self._failure(listeners)
            if killed := await self._kill_all():
                await asyncio.wait([listeners[rank] for rank in killed])
        finally:
            for listener in listeners:
                listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        fields: dict[str, Any] = {"outcome": "failed", "step": self._step, "error": error} if error else self._done
        outcome = Outcome(**fields)
        self._report("finished", outcome=outcome.outcome, step=outcome.step)
        return outcome

    async def _failure(self, listeners: Sequence[asyncio.Task[RankFailed | None]]) -> RankFailed | None:
        """Wait until a rank fails and return the error nearest to the cause, or None once all are done."""
        pending: set[asyncio.Future[Any]] = {*listeners, self._killed}
        failures: list[RankFailed] = []
        while not failures and not all(listener.done() for listener in listeners):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self._killed in done:
                return RankFailed(0, self._killed.result(), code="killed")
            failures = [error for task in listeners if task in done and (error := task.result())]
        if failures and _distance(failures[0]):
            ended, _ = await asyncio.wait(listeners, timeout=_GRACE_S)
            # Of equally near errors, the first is returned.
            failures += [error for task in listeners if task in ended and (error := task.result())]
        return min(failures, key=_distance, default=None)

    async def _listen(self, rank: int) -> RankFailed | None:
        """Handle a rank's events until the rank is done or has failed; return the failure, or None if done."""
        acknowledged = 0
        try:
            while True:
                event = await self._hosts[rank].next_event(acknowledged)
                acknowledged = event.pop("number")
                match event.pop("event"):
                    case "done":
                        if rank == 0:
                            self._done, self._left_s = event, time.monotonic()
                        return None
                    case "fatal":
                        return _raised(rank, event["type"], event["message"])
                    case "hung":
                        return RankFailed(rank, event["how"], code="rank_hung")
                    case "ended" if event["starved"]:
                        return RankFailed(rank, "died: the host's memory ran out", code="rank_died", blame="memory")
                    case "ended":
                        return RankFailed(rank, f"died: it {event['how']}", code="rank_died")
                    case name:
                        self._take(rank, name, event)
        except RuntimeLayerError as error:  # the rank's supervisor is gone
            return RankFailed(rank, f"died: {error}", code="rank_died")
        except Exception as error:  # if the group did not end, nothing would restart the job
            log.exception("the events of a rank cannot be handled", extra={"job_id": self._job_id})
            return RankFailed(rank, f"sent an event that could not be handled: {error!r}")

    def _take(self, rank: int, name: str, event: dict[str, Any]) -> None:
        self._step = max(self._step, event.get("step", 0))  # another rank's "ready" may come later
        if name != "ready":
            self._report(name, **event)
            return
        self._ready.add(rank)
        if len(self._ready) == len(self._hosts) and not self._adopted:
            self._report("started", step=self._step)

    def _report(self, event: str, **data: Any) -> None:
        self._on_event({"event": event, **data, "job": self._job_id})

    async def _kill_all(self) -> list[int]:
        """Kill all ranks; return the ranks whose supervisors confirmed it. An unreachable supervisor, which died
        together with its rank, must not block the report of the group's end."""
        failures = await asyncio.gather(*(host.kill() for host in self._hosts), return_exceptions=True)
        for rank, error in enumerate(failures):
            if error is not None:
                log.warning("rank %d could not be killed: %s", rank, error, extra={"job_id": self._job_id})
        return [rank for rank, error in enumerate(failures) if error is None]


def _raised(rank: int, kind: str, message: str) -> RankFailed:
    if isinstance(getattr(errors, kind, None), type):  # the job's input is at fault; the message says what to change
        return RankFailed(rank, message, code=kind, blame="own", retryable=False)
    return RankFailed(rank, f"raised {kind}: {message}", code=kind, blame="own")


def _distance(error: RankFailed) -> int:
    """Return how far a failure is from its cause; at 0 no other rank can have a nearer error."""
    if error.code == "rank_died":
        return 2 if error.blame == "memory" else 3
    return 4 if error.code in _SYMPTOMS else int(error.blame == "own")


class RankHost:
    """Supervises one rank at a time, forked from the warm parent at `warm_socket`, with its log in `log_dir`.
    numa_node: the device's NUMA node, on which the rank runs; None: any node.
    """

    def __init__(self, warm_socket: str, log_dir: str, numa_node: int | None = None, limits: PingLimits = PingLimits()):
        self._limits = limits
        self._warm_socket, self._log_dir, self._numa_node = warm_socket, Path(log_dir), numa_node
        # Ranks of a world meet at a file there; torch's default, a port, accepts connections from anyone.
        self._worlds = Path(warm_socket).with_name(WORLDS)
        self._meeting: Path | None = None
        self._child: Child | None = None
        self._place: dict[str, Any] = dict(NOWHERE)
        self._events = _Events()

    async def start(
        self, spec: dict[str, Any], rank: int, world_size: int, meeting: str, device: str, snapshot: str | None = None
    ) -> None:
        """Fork the rank and return as soon as its process exists; the rank joins the world by itself. Raises
        WarmParentError.

        device: an address (DeviceKind.address). meeting: a unique name for the world, which has all ranks on this node.
        """
        await self.kill()
        self._place = {"job_id": spec["job_id"], "rank": rank, "world_size": world_size}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._meeting = self._worlds / meeting
        self._worlds.mkdir(mode=0o700, exist_ok=True)
        env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        # All ranks are on one node; other machines could reach the address that collectives use by default.
        env["GLOO_SOCKET_IFNAME"] = "lo"
        kind = kind_of(spec["device_kind"])
        # Set after the fork, because the parent never touches a device.
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
        self._events = _Events(self._child, self._limits)

    async def life(self) -> dict[str, Any]:
        """Identify this supervisor's process (runtime.processes.kernel.life). An answer proves that it is alive."""
        return life()

    async def status(self) -> dict[str, Any]:
        """Return `{"job_id", "rank", "world_size"}` of the newest rank, dead or alive. "job_id" is "" before the first
        rank, and after `kill` has freed the device."""
        return self._place

    async def suspend(self) -> None:
        """Have the rank release its device after the current micro-batch. Raises ChildDied."""
        await self._started().call("suspend")

    async def next_event(self, after: int = 0) -> dict[str, Any]:
        """Return the rank's first event with a "number" above `after`. A call acknowledges all events up to `after`,
        and may be repeated if its answer was lost. The last event is "ended" (how; starved: whether memory ran out).
        """
        self._started()
        return await self._events.next(after)

    async def kill(self) -> None:
        """Kill the rank, if one exists, and return when its device is free.

        On a loaded machine the kernel may need more than the timeout to free the rank's memory, so the wait repeats.
        """
        # Objects of this rank: the next rank may start while this call still waits.
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
    """The numbered events of one rank: the events that it sends, then "hung" if it hangs, and "ended"."""

    def __init__(self, child: Child | None = None, limits: PingLimits = PingLimits()):
        self._kept: list[dict[str, Any]] = []
        self._count = 0
        self._news = asyncio.Condition()
        self._limits = limits
        if child is not None:
            self._reader = asyncio.create_task(self._read(child), name=f"events of {child.name}")
            self._watcher = asyncio.create_task(self._watch(child), name=f"pings of {child.name}")

    async def next(self, after: int) -> dict[str, Any]:
        async with self._news:
            while True:
                self._kept = [event for event in self._kept if event["number"] > after or event["event"] in STATES]
                for event in self._kept:
                    if event["number"] > after:
                        return dict(event)
                await self._news.wait()

    async def _add(self, event: dict[str, Any]) -> None:
        async with self._news:
            self._count += 1
            self._kept.append({**event, "number": self._count})
            self._news.notify_all()

    async def _read(self, child: Child) -> None:
        while (event := await child.next_event()) is not None:
            await self._add(event)
        self._watcher.cancel()
        await self._add({"event": "ended", "starved": child.starved, "how": child.how_it_ended()})

    async def _watch(self, child: Child) -> None:
        """Add "hung" and kill the rank once it is silent, or in one phase for too long. If the rank resumed, no group
        would read its later events."""
        limits, how = self._limits, ""
        while not how:
            await asyncio.sleep(limits.ping_every_s)
            is_ready = any(event["event"] == "ready" for event in self._kept)
            timeout_s = limits.ping_timeout_s if is_ready else limits.long_ping_timeout_s
            try:
                report = await child.call("ping", timeout_s=timeout_s)
            except ChildTimeout:
                how = f"did not answer within {timeout_s} s (stopped or starved)"
            except RuntimeLayerError:
                return  # `_read` reports why the rank ended
            else:
                if report["phase"] != "done" and report["in_phase_s"] > limits.phase_limit_s:
                    how = f"hangs in phase {report['phase']!r} at step {report['step']} "
                    how += f"for {report['in_phase_s']:.0f} s"
        await self._add({"event": "hung", "how": how})
        child.kill()
