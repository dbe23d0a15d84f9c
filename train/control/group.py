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

from runtime.devices import kinds
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
    """How a group ended. `error` is {"code", "message", "retryable", "blame", "by_device"} when failed. blame: "own" if
    a rank raised an error, "memory" if the OOM killer killed it, else "outside": it was killed, stopped, or its
    supervisor died, which is not a fault of the job. by_device: the rank's device may have caused it: the rank died
    without a word, or of an error of that kind."""

    outcome: Literal["succeeded", "failed", "suspended"]
    step: int = 0
    error: dict[str, Any] | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class _Failed(Exception):
    """How a world failed. error: what differs of `Outcome.error` from a failure that is not the job's and can be
    retried."""

    def __init__(self, rank: int, reason: str, **error: Any):
        usual = {"code": "rank_failed", "message": f"rank {rank} {reason}", "retryable": True, "blame": "outside"}
        self.error = usual | {"rank": rank, "reason": reason, "by_device": False} | error


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
        self._killed: asyncio.Future[None] | None = None
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
        self._begin()
        assert self._following is not None
        while len(self._ready) < len(hosts) and not self._following.done():
            await asyncio.wait([self._following], timeout=0.01)
        if self._following.done() and (error := self._following.result().error) is not None:
            raise RankFailed(error["rank"], error["reason"], retryable=error["retryable"], blame=error["blame"])

    async def adopt(self, job_id: str, hosts: Sequence[Host]) -> None:
        """Take over the ranks of another Group whose process died. `hosts`: all of them, in the order of ranks.

        It delivers unacknowledged events now, the last of them perhaps a second time.
        """
        self._hosts, self._job_id = list(hosts), job_id
        self._begin()

    def _begin(self) -> None:
        self._killed = asyncio.get_running_loop().create_future()
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
        assert self._killed is not None, "start the group first"
        if not self._killed.done():
            self._killed.set_result(None)
        return await self.wait()

    async def wait(self) -> Outcome:
        """How the group ended; returns when no process of it is left."""
        assert self._following is not None, "start the group first"
        return await asyncio.shield(self._following)

    async def _follow(self) -> Outcome:
        """Listen to all ranks until all are done, or one fails; then kill what is left of them."""
        ranks = range(len(self._hosts))
        self._listeners = [asyncio.create_task(self._listen(rank)) for rank in ranks]
        tasks = [*self._listeners, *(asyncio.create_task(self._watch(rank)) for rank in ranks)]
        assert self._killed is not None
        pending: set[asyncio.Future[None]] = {*tasks, self._killed}
        try:
            while not all(listener.done() for listener in self._listeners):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if self._killed in done:
                    raise _Failed(0, "was killed on request", code="killed")
                for task in done:
                    task.result()
            detail = self._done[0]
            outcome = Outcome(detail["outcome"], detail["step"], None, detail)
        except _Failed as failed:
            outcome = Outcome("failed", self._step, failed.error)
        except _Lost as lost:
            outcome = Outcome("failed", self._step, (await self._blame(lost.rank)).error)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill_all()
        self._report("finished", outcome=outcome.outcome, step=outcome.step, error=outcome.error)
        return outcome

    async def _listen(self, rank: int) -> None:
        """Take the events of a rank until it is done."""
        heard = 0
        while rank not in self._done:
            try:
                event = await self._hosts[rank].next_event(heard)
            except RuntimeLayerError as error:  # its supervisor is gone
                raise _Lost(rank) from error
            if event is None:
                raise _Lost(rank)
            heard, name = event["number"], event["event"]
            if name == "ready":
                self._ready[rank] = event
                if len(self._ready) == len(self._hosts) and self._started_s is not None:
                    self._report_started(time.monotonic() - self._started_s)
            elif name == "done":
                self._done[rank] = event | {"left_s": time.monotonic()}
            elif name == "fatal":
                self._fatal[rank] = event
                raise _Lost(rank)
            else:
                self._step = event.get("step", self._step)
                try:
                    self._report(**{key: value for key, value in event.items() if key != "number"})
                except Exception as error:  # it must not be lost silently, with all later ones
                    raise _Failed(rank, f"sent an event that could not be handled: {error!r}") from error

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
            error = {"code": kind, "blame": "own", "by_device": kinds.is_of_a_device(kind, message)}
            if isinstance(getattr(errors, kind, None), type):  # of the input, in words for who gave it
                error |= {"retryable": False, "message": message}
            return _Failed(rank, f"raised {kind}: {message}", **error)
        if any(isinstance(one, ChildDied) and one.starved for one in deaths.values()):
            return _Failed(rank, "died: the host's memory ran out", blame="memory")
        death = deaths.get(rank)
        how = f"died: {death}" if isinstance(death, SupervisorDied) else "died (killed, or out of memory)"
        return _Failed(rank, how, by_device=True)

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

    async def _kill_all(self) -> None:
        """Kill all ranks. An unreachable host must not block the report of the group's end: its rank died with it. Such
        an error once left a suspend waiting for ever."""
        kills = (host.kill() for host in self._hosts)
        for rank, error in enumerate(await asyncio.gather(*kills, return_exceptions=True)):
            if error is not None:
                log.warning("rank %d could not be killed: %s", rank, error, extra={"job_id": self._job_id})
