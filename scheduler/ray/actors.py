"""Starts, finds, calls and watches named detached actors. They outlive the controller.

`Supervisor` calls an actor, and its calls end when the actor is gone. Ray's own report of a death is not enough: when
the machine was short of memory it arrived as an unexpected error type, and steps waiting for seven dead supervisors ran
into their time limits, six minutes in all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from runtime.errors import ChildDied, ChildError, RuntimeLayerError, SupervisorDied
from runtime.processes.kernel import life
from scheduler.core.errors import Blame, EffectFailed
from serve.core.errors import (
    EngineOutOfMemory,
    EngineRefused,
    NotReloadable,
    ReloadFailed,
    ServeError,
    VersionBroken,
    VersionMismatch,
    WithoutNumbers,
)
from train.plan.errors import RankFailed, TrainError

log = logging.getLogger(__name__)

UNNAMED_TIMEOUT_S = 30.0
# After PROVE_EVERY_S without an answer a supervisor is pinged, and has HUNG_S to reply. A supervisor that is stopped
# (SIGSTOP) or gets no CPU is not dead yet; killing it would kill its engine or rank.
PROVE_EVERY_S = 5.0
HUNG_S = 30.0
ANSWER_S = 20.0
# An observation waits no longer than this for a known supervisor; its last seen state is used instead.
LOOK_S = 2.0
# A supervisor without an engine or rank can be replaced safely: after this long without an answer, it is.
IDLE_HUNG_S = 5.0


def named_actor(body: type, name: str, ray_node_id: str, *arguments: Any) -> Any:
    """Start or find a thin supervisor on a node: named and detached. Ray neither restarts it nor tracks its resources:
    the scheduler restarts it, and the lease's reservation holds its resources."""
    actor = ray.remote(body).options(
        name=name,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=64,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
    )
    return actor.remote(*arguments)


def find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def actor_names() -> list[str]:
    return await asyncio.to_thread(list_named_actors)


async def until_unnamed(name: str) -> None:
    async with asyncio.timeout(UNNAMED_TIMEOUT_S):
        while name in await actor_names():
            await asyncio.sleep(0.01)


class Supervisor:
    """An actor's handle and the lifetime of its process. For a process on this machine the kernel itself reports its
    end. A supervisor that is `over` stays so; callers that need it again create or find another one."""

    def __init__(self, actor: Any, name: str):
        self.actor, self.name = actor, name
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfd = -1
        self._answered = False  # until then its process may still be starting, without a time limit
        self._attending: asyncio.Task[None] | None = asyncio.create_task(self._attend(), name=f"life of {name}")

    @property
    def over(self) -> bool:
        return self._over.done()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The actor's answer. Raises SupervisorDied if it dies in the meantime or never answers, and whatever its
        method raises."""
        if self._over.done():
            raise SupervisorDied(self.name, self._over.result())
        answer = asyncio.ensure_future(_awaited(getattr(self.actor, method).remote(*arguments, **named)))
        try:
            while True:
                await asyncio.wait({answer, self._over}, timeout=PROVE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                if self._over.done():
                    raise SupervisorDied(self.name, self._over.result())
                if self._answered:
                    await self._prove(answer)
        except RayTaskError:
            raise
        except RayError as error:
            if not isinstance(error, ActorUnavailableError):
                self.end(first_line(error))
            raise SupervisorDied(self.name, first_line(error)) from error
        finally:
            answer.cancel()

    async def _prove(self, answer: asyncio.Future[Any]) -> None:
        """Returns when the supervisor replies or the answer has come; ends a supervisor that stays silent."""
        proof = asyncio.ensure_future(_awaited(self.actor.life.remote()))
        try:
            await asyncio.wait({proof, answer, self._over}, timeout=HUNG_S, return_when=asyncio.FIRST_COMPLETED)
            if proof.done() or answer.done() or self._over.done():
                if proof.done() and not answer.done() and not self._over.done():
                    proof.result()
                return
        finally:
            proof.cancel()
        self._end_silent(HUNG_S)

    async def call_idle(self, method: str) -> Any:
        """Like `call`, for a supervisor without work: it is killed after `IDLE_HUNG_S` of silence."""
        answer = asyncio.ensure_future(self.call(method))
        try:
            while True:
                begun = self._answered
                await asyncio.wait({answer}, timeout=IDLE_HUNG_S)
                if answer.done():
                    return answer.result()
                if begun:
                    self._end_silent(IDLE_HUNG_S)
        finally:
            answer.cancel()

    def _end_silent(self, seconds: float) -> None:
        why = f"it did not answer for {seconds:.0f} s and was killed"
        log.error("%s: %s", self.name, why)
        self.kill()
        self.end(why)

    def kill(self) -> None:
        """Kill its process, and with it everything on its lifeline. On this machine that works without Ray too."""
        if self._pidfd >= 0 and not self._over.done():
            with suppress(ProcessLookupError):  # reaped already, before the loop heard of its end
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ray.kill(self.actor)

    def end(self, why: str) -> None:
        """Mark it as over: it is known to be gone, or nobody calls it any more."""
        if not self._over.done():
            self._over.set_result(why)
        if self._attending is not None:
            self._attending.cancel()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    async def _attend(self) -> None:
        try:
            its = await self.actor.life.remote()
            self._answered = True
            if its["kernel"] != life()["kernel"]:
                return
            self._pidfd = os.pidfd_open(its["pid"])
        except RayError as error:
            if not isinstance(error, ActorUnavailableError):
                self._attending = None
                self.end(first_line(error))
            return
        except ProcessLookupError:
            self._attending = None
            self.end("its process is gone")
            return
        except OSError as error:  # this kernel has no pidfd, so only Ray reports the end
            log.info("%s: its process cannot be watched: %s", self.name, error)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.end, "its process was killed")


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def within(verb: str, target: str, answer: Awaitable[Any], seconds: float = ANSWER_S) -> Any:
    """An answer that should come at once. Raises EffectFailed if it takes longer: a stopped supervisor must not block
    its caller."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise EffectFailed(verb, target, f"its supervisor has not answered for {seconds:.0f} s", "outside") from error


async def ask(verb: str, target: str, answer: Awaitable[Any]) -> Any:
    """Await an actor's or group's answer. Any error there becomes EffectFailed with the error's first line."""
    try:
        return await answer
    except RayTaskError as error:
        raise _failed(verb, target, getattr(error, "cause", None) or error) from error
    except RayError as error:
        raise EffectFailed(verb, target, first_line(error), "outside") from error
    except (RuntimeLayerError, ServeError, TrainError, OSError, TimeoutError) as error:
        raise _failed(verb, target, error) from error


def _failed(verb: str, target: str, error: BaseException) -> EffectFailed:
    of_settings = isinstance(error, EngineRefused)
    return EffectFailed(verb, target, first_line(error), blame_of(error), of_settings=of_settings)


def cause_of(failed: EffectFailed) -> BaseException | None:
    """The error that `ask` made this of."""
    told = failed.__cause__
    return getattr(told, "cause", None) or told


def blame_of(error: BaseException) -> Blame:
    """What an error of a supervisor, rank or engine is attributed to."""
    if isinstance(error, EngineOutOfMemory) or (isinstance(error, ChildDied) and error.starved):
        return "memory"
    if isinstance(error, RankFailed):
        return error.blame if error.retryable else "input"
    if isinstance(error, VersionBroken | WithoutNumbers):
        return "input"
    if isinstance(error, ReloadFailed):
        return "reload"
    if isinstance(error, NotReloadable | VersionMismatch):
        return "version"
    if isinstance(error, RuntimeLayerError | OSError | TimeoutError) and not _of_the_engine(error):
        return "outside"
    return "own"


def _of_the_engine(error: BaseException) -> bool:
    """Whether a process died by itself or answered with its own error."""
    return isinstance(error, ChildDied | ChildError) and not isinstance(error, SupervisorDied)


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
