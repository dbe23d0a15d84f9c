"""Starts, finds, calls and watches named detached actors, which outlive the controller. Calls through a `Supervisor`
end when its actor is gone or silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from runtime.errors import ChildDied, ChildError, RuntimeLayerError, SupervisorDied
from scheduler.core.errors import Blame, EffectFailed
from serve.core.errors import (
    EngineOutOfMemory,
    EngineRefused,
    ReloadFailed,
    ServeError,
    VersionBroken,
    VersionMismatch,
    WithoutNumbers,
)
from train.plan.errors import RankFailed, TrainError

log = logging.getLogger(__name__)

REPLICA, RANK = "replica:", "rank:"  # prefixes of actor names; the id of a replica or device follows
UNNAMED_TIMEOUT_S = 30.0
# A supervisor is pinged every PROVE_EVERY_S, and has HUNG_S to reply: a stopped (SIGSTOP) or CPU-starved supervisor may
# recover, and killing it kills its engine or rank.
PROVE_EVERY_S = 5.0
HUNG_S = 30.0
ANSWER_S = 20.0
# An observation waits at most this long for a known supervisor, then uses its last known state.
LOOK_S = 2.0
# A supervisor without an engine or rank is replaced after this long without an answer.
IDLE_HUNG_S = 5.0


def named_actor(body: type, name: str, ray_node_id: str, *arguments: Any) -> Any:
    """Start or find a thin supervisor, a named detached actor, on a node. The scheduler, not Ray, restarts the actor,
    and the lease's reservation holds its resources."""
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


class Silent(EffectFailed):
    """A supervisor did not answer within its time limit."""


class Supervisor:
    """An actor's handle, and whether its process lives. `over` never becomes False again: callers then create or find
    another supervisor. `answered`: False while the process may still be starting, which has no time limit. `reported`:
    True once it has reported its status.
    """

    def __init__(self, actor: Any, name: str):
        self.actor, self.name, self.answered, self.reported = actor, name, False, False
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._attending = asyncio.create_task(self._attend(), name=f"life of {name}")

    @property
    def over(self) -> bool:
        return self._over.done()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the actor. Raises the method's errors; SupervisorDied if the actor dies or never answers."""
        if self._over.done():
            raise SupervisorDied(self.name, self._over.result())
        answer = asyncio.ensure_future(getattr(self.actor, method).remote(*arguments, **named))
        try:
            await asyncio.wait({answer, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise SupervisorDied(self.name, self._over.result())
            return answer.result()
        except RayTaskError:
            raise
        except RayError as error:
            if not isinstance(error, ActorUnavailableError):
                self.end(first_line(error))
            raise SupervisorDied(self.name, first_line(error)) from error
        finally:
            answer.cancel()

    async def status(self, *, patient: bool = False) -> dict[str, Any]:
        """Read the actor's status. An actor that has reported before has `LOOK_S` to answer, unless `patient`. Raises
        Silent, and the errors of `call`."""
        seconds = LOOK_S if self.reported and not patient else ANSWER_S
        status = await within(self.call("status"), self.name, seconds)
        self.reported = True
        return status

    async def _attend(self) -> None:
        """Mark it as over when it dies or stays silent."""
        while True:
            try:
                async with asyncio.timeout(HUNG_S if self.answered else None):
                    await self.actor.life.remote()
                self.answered = True
            except TimeoutError:
                return self.kill(f"it did not answer for {HUNG_S:.0f} s and was killed")
            except ActorUnavailableError:
                pass  # the node may become reachable again
            except RayError as error:
                return self.end(first_line(error))
            await asyncio.sleep(PROVE_EVERY_S)

    def kill(self, why: str) -> None:
        """Kill the actor's process, and with it all processes on its lifeline."""
        log.info("%s: %s", self.name, why)
        ray.kill(self.actor)
        self.end(why)

    def end(self, why: str) -> None:
        """Mark the supervisor as over: it is gone, or will not be called any more."""
        if not self._over.done():
            self._over.set_result(why)
        if self._attending is not asyncio.current_task():
            self._attending.cancel()


async def within(answer: Awaitable[Any], name: str, seconds: float = ANSWER_S) -> Any:
    """Await an answer that the actor `name` should give at once. Raises Silent after a time limit: a stopped
    supervisor must not block its caller."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise Silent(f"supervisor {name} has not answered for {seconds:.0f} s", "outside") from error


@contextlib.contextmanager
def errors_as_failures() -> Iterator[None]:
    """Turn any error of an actor or group into EffectFailed with the error's first line."""
    try:
        yield
    except RayTaskError as error:
        raise _failed(getattr(error, "cause", None) or error) from error
    except RayError as error:
        raise EffectFailed(first_line(error), "outside") from error
    except (RuntimeLayerError, ServeError, TrainError, OSError, TimeoutError) as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> EffectFailed:
    return EffectFailed(first_line(error), blame_of(error), of_settings=isinstance(error, EngineRefused))


def blame_of(error: BaseException) -> Blame:
    """Return whose fault an error of a supervisor, rank or engine is."""
    if isinstance(error, EngineOutOfMemory) or (isinstance(error, ChildDied) and error.starved):
        return "memory"
    if isinstance(error, RankFailed):
        return error.blame if error.retryable else "input"
    if isinstance(error, VersionBroken | WithoutNumbers):
        return "input"
    if isinstance(error, ReloadFailed | VersionMismatch):
        return "version"
    if isinstance(error, SupervisorDied):
        return "outside"
    if isinstance(error, ChildDied | ChildError):  # a process died by itself or reported an error of its own
        return "own"
    return "outside" if isinstance(error, RuntimeLayerError | OSError | TimeoutError) else "own"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
