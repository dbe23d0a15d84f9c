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
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from runtime.errors import ChildDied, ChildTimeout, RuntimeLayerError, SupervisorDied
from train.plan import errors
from train.plan.errors import RankFailed
from train.plan.spec import TrainSpec

log = logging.getLogger(__name__)

# Exceptions that mean "another rank is gone": never the root cause.
_SYMPTOMS = ("DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError", "ConnectionError")
_OWN_RANK_GRACE_S = 0.5


class Host(Protocol):
    """What a group needs of a RankHost; a Ray actor handle behind a thin adapter will do."""

    async def start(
        self, spec: dict, rank: int, world_size: int, meeting: str, device: str, snapshot: str | None = None
    ) -> None: ...
    async def call(self, method: str, timeout_s: float | None = None, **args: Any) -> Any: ...
    async def next_event(self, after: int = 0) -> dict | None: ...
    async def kill(self) -> None: ...


@dataclass(frozen=True)
class PingLimits:
    """When a rank counts as hung. A separate thread answers `ping`, so silence means that the process is stopped; but
    a library may hold Python's lock for seconds, as torch does while a device begins."""

    ping_every_s: float = 1.0
    ping_timeout_s: float = 5.0
    long_ping_timeout_s: float = 60.0  # until it is ready
    phase_limit_s: float = 900.0  # of one micro-batch, one validation, one tokenisation ...


@dataclass(frozen=True)
class SuspendReport:
    """`snapshot_path` is None if the job had not done a step yet. seconds: agree (until the step is done or left),
    snapshot, exit (the rest until the devices are free), total."""

    step: int
    snapshot_path: str | None
    bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """How a group ended. `error` is {"code", "message", "retryable", "blame", "rank", "reason"} when failed. blame:
    "own" if a rank raised an error, "memory" if the OOM killer killed it, else "outside": it was killed, stopped, or
    its supervisor died, which is not a fault of the job."""

    outcome: Literal["succeeded", "failed", "suspended"]
    step: int = 0
    error: dict[str, Any] | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class _Failed(Exception):
    """How a world failed. error: what differs of `Outcome.error` from a failure that is not the job's and can be
    retried."""

    def __init__(self, rank: int, reason: str, **error: Any):
        usual = {"code": "rank_failed", "message": f"rank {rank} {reason}", "retryable": True, "blame": "outside"}
        self.error = usual | {"rank": rank, "reason": reason} | error


class _Lost(Exception):
    """A rank ended before its work, by itself or with another one: `_blame` says which is at fault."""

    def __init__(self, rank: int):
        self.rank = rank


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
        self._hosts: list[Host] = []
        self._job_id = ""
        self._step = 0
        self._listeners: list[asyncio.Task] = []
        self._ready: dict[int, dict] = {}
        self._done: dict[int, dict] = {}
        self._fatal: dict[int, dict] = {}
        self._killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self._following: asyncio.Task[Outcome] | None = None
        self._started_s: float | None = None  # of a world that was not adopted

    async def start(
        self, spec: TrainSpec, hosts: Sequence[Host], devices: Sequence[str], snapshot: str | None = None
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

    async def adopt(self, job_id: str, hosts: Sequence[Host], *, whole: bool = True) -> None:
        """Take over the ranks of another Group whose process died, dead ones too, in the order of ranks. whole: whether
        these are all; else it ends them.

        It delivers unacknowledged events now, the last of them perhaps a second time.
        """
        self._hosts, self._job_id = list(hosts), job_id
        if not whole:
            self._killed.set_result("belongs to a world of which other ranks are missing")
        self._following = asyncio.create_task(self._follow(), name=f"{self._job_id} ranks")

    async def suspend(self) -> SuspendReport | None:
        """Leave the devices with a snapshot of the last step boundary, or of the next if it is near; returns when they
        are free: no process is left.

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
        total = time.monotonic() - started
        snapshot_s = outcome.detail["seconds"]["snapshot"]
        # Its "leave" is all the time of rank 0 between the step boundary and its last message, snapshot included.
        agree_s = max(0.0, outcome.detail["left_s"] - started - outcome.detail["seconds"]["leave"])
        seconds = {"agree": agree_s, "snapshot": snapshot_s, "exit": total - agree_s - snapshot_s, "total": total}
        return SuspendReport(outcome.step, outcome.detail["snapshot_path"], outcome.detail["bytes"], seconds)

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
        detail = {"outcome": "failed", "step": self._step} if error else self._done[0]
        outcome = Outcome(detail["outcome"], detail["step"], error, detail)
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
            return failed.error
        except _Lost as lost:
            return (await self._blame(lost.rank)).error
        except Exception as error:  # whatever it is: without an end, nobody would start the job again
            log.exception("its ranks cannot be followed", extra={"job_id": self._job_id})
            return _Failed(0, f"could not be followed: {error!r}").error
        return None

    async def _listen(self, rank: int) -> None:
        """Take the events of a rank until it is done."""
        acknowledged = 0
        while True:
            try:
                event = await self._hosts[rank].next_event(acknowledged)
            except RuntimeLayerError as error:  # its supervisor is gone
                raise _Lost(rank) from error
            if event is None:
                raise _Lost(rank)
            acknowledged = event["number"]
            if event["event"] == "fatal":
                self._fatal[rank] = event
                raise _Lost(rank)
            if event["event"] == "done":
                self._done[rank] = event | {"left_s": time.monotonic()}
                return
            try:
                self._take(rank, event)
            except Exception as error:  # it must not be lost silently, with all later ones
                raise _Failed(rank, f"sent an event that could not be handled: {error!r}") from error

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self._ready[rank] = event
            if len(self._ready) == len(self._hosts) and self._started_s is not None:
                self._report_started(time.monotonic() - self._started_s)
        else:
            self._step = event.get("step", self._step)
            self._report(**{key: value for key, value in event.items() if key != "number"})

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

    def _report_started(self, start_s: float) -> None:
        seconds = {key: max(ready["seconds"][key] for ready in self._ready.values()) for key in ("join", "prepare")}
        self._step = self._ready[0]["step"]
        self._report("started", step=self._step, devices=len(self._hosts), seconds={**seconds, "start": start_s})

    def _report(self, event: str, **data: Any) -> None:
        self._on_event({"event": event, **data, "job": self._job_id})

    async def _blame(self, first: int) -> _Failed:
        # When one rank dies, the others raise from their collectives within 0.1 s, sometimes before its death is seen:
        # wait briefly and blame the one with its own error.
        await asyncio.sleep(_OWN_RANK_GRACE_S)
        ranks = [rank for rank in range(len(self._hosts)) if rank not in self._fatal]
        deaths = dict(zip(ranks, await asyncio.gather(*map(self._death, ranks)), strict=True))
        gone = [rank for rank, death in deaths.items() if death is not None]
        if gone:  # but their last messages may still be in flight: a listener ends when it has read all
            await asyncio.wait([self._listeners[rank] for rank in gone], timeout=self._limits.ping_timeout_s)
        own = [rank for rank, fatal in self._fatal.items() if fatal["type"] not in _SYMPTOMS]
        silent = [rank for rank in gone if rank not in self._fatal]
        rank = (own or silent or [first])[0]
        fatal = self._fatal.get(rank)
        if fatal is not None:
            kind, message = fatal["type"], fatal["message"]
            error = {"code": kind, "blame": "own"}
            if isinstance(getattr(errors, kind, None), type):  # of the input, in words for who gave it
                error |= {"retryable": False, "message": message}
            return _Failed(rank, f"raised {kind}: {message}", **error)
        if any(isinstance(death, ChildDied) and death.starved for death in deaths.values()):
            return _Failed(rank, "died: the host's memory ran out", blame="memory")
        death = deaths.get(rank)
        how = f"died: {death}" if isinstance(death, SupervisorDied) else "died (killed, or out of memory)"
        return _Failed(rank, how)

    async def _death(self, rank: int) -> RuntimeLayerError | None:
        """Cause of its death; None while it lives."""
        try:
            async with asyncio.timeout(2 * self._limits.ping_timeout_s):  # its supervisor may be stopped, too
                await self._hosts[rank].call("ping", timeout_s=self._limits.ping_timeout_s)
        except RuntimeLayerError as error:
            return error
        except TimeoutError:
            return None
        return None

    async def _kill_all(self) -> list[int]:
        """Kill all ranks; returns those whose supervisors did. An unreachable one must not block the report of the
        group's end: its rank died with it. Such an error once left a suspend waiting for ever."""
        failures = await asyncio.gather(*(host.kill() for host in self._hosts), return_exceptions=True)
        for rank, error in enumerate(failures):
            if error is not None:
                log.warning("rank %d could not be killed: %s", rank, error, extra={"job_id": self._job_id})
        return [rank for rank, error in enumerate(failures) if error is None]
