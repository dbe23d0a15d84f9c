"""Supervisors: a call ends when the one who is to answer is gone, however that becomes known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from runtime.errors import ChildDied, ChildTimeout, SupervisorDied, WarmParentError
from scheduler.core.errors import EffectFailed
from scheduler.ray import actors
from scheduler.ray.actors import Supervisor, blame_of, errors_as_failures
from serve.core.errors import (
    EngineFailed,
    EngineOutOfMemory,
    EngineRefused,
    EngineStartFailed,
    ReloadFailed,
    VersionBroken,
    VersionMismatch,
    VersionUnreadable,
    WithoutNumbers,
)
from tests.unit.scheduler.fakes import in_virtual_time
from train.plan.errors import RankFailed


class Method:
    def __init__(self, answer: Callable[..., Any]):
        self._answer = answer

    async def remote(self, *arguments: Any) -> Any:
        answer = self._answer(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


class Actor:
    """A handle whose methods are given by name."""

    def __init__(self, **methods: Callable[..., Any]):
        self._methods = {"life": dict, **methods}

    def __getattr__(self, name: str) -> Method:
        return Method(self._methods[name])


def raising(error: BaseException) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        raise error

    return answer


async def never(*arguments: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def killed(monkeypatch) -> list[Actor]:
    found: list[Actor] = []
    monkeypatch.setattr(actors.ray, "kill", found.append)
    return found


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed by the memory monitor")])
async def test_whatever_ray_says_of_a_death_is_one(error) -> None:
    supervisor = Supervisor(Actor(work=raising(error)), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert supervisor.over


async def test_one_that_cannot_be_reached_now_may_be_asked_again() -> None:
    answers = iter([raising(ActorUnavailableError("lost the connection", None)), lambda: 1])
    supervisor = Supervisor(Actor(work=lambda: next(answers)()), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert await supervisor.call("work") == 1


@in_virtual_time
async def test_supervisor_that_stays_silent_is_killed(killed) -> None:
    lives = iter([lambda: {}])
    actor = Actor(work=never, life=lambda: next(lives, never)())
    supervisor = Supervisor(actor, "r")
    with pytest.raises(SupervisorDied, match="it did not answer"):
        await supervisor.call("work")
    assert killed == [actor] and supervisor.over


@in_virtual_time
async def test_supervisor_that_dies_ends_calls_that_ray_does_not_answer(killed) -> None:
    lives = iter([lambda: {}])
    supervisor = Supervisor(Actor(work=never, life=lambda: next(lives, raising(ActorDiedError()))()), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert supervisor.over and not killed


@in_virtual_time
async def test_one_that_has_not_begun_yet_is_waited_for(killed) -> None:
    begun = asyncio.Event()

    async def work() -> int:
        await begun.wait()
        return 5

    calling = asyncio.create_task(Supervisor(Actor(work=work, life=begun.wait), "r").call("work"))
    await asyncio.sleep(10 * actors.HUNG_S)
    begun.set()
    assert await calling == 5 and not killed


@pytest.mark.parametrize(
    "error, blame",
    [
        (EngineStartFailed("no such kernel"), "own"),
        (EngineRefused("no such quantisation"), "own"),
        (EngineOutOfMemory("no room"), "memory"),
        (EngineFailed("it died"), "own"),
        (ReloadFailed("no parameter has an output_dim"), "version"),
        (VersionMismatch("another chat template"), "version"),
        (VersionBroken("no numbers"), "input"),
        (WithoutNumbers("no numbers"), "input"),
        (VersionUnreadable("no file"), "own"),
        (WarmParentError("gone"), "outside"),
        (SupervisorDied("r", "killed"), "outside"),
        (ChildDied("rank 0", 1, "log"), "own"),
        (ChildDied("rank 0", 1, "log", "", True), "memory"),
        (ChildTimeout("no answer"), "outside"),
        (TimeoutError(), "outside"),
        (RankFailed(0, "raised ValueError", retryable=True), "own"),
        (RankFailed(0, "died", retryable=True, blame="outside"), "outside"),
        (RankFailed(0, "raised InvalidTrainingData", retryable=False), "input"),
    ],
)
async def test_whose_fault_an_error_is(error, blame) -> None:
    assert blame_of(error) == blame
    for raised in (error, RayTaskError("work", "traceback", error).as_instanceof_cause()):
        with pytest.raises(EffectFailed) as failed, errors_as_failures():
            await Method(raising(raised)).remote()
        assert failed.value.blame == blame, raised
        assert failed.value.of_settings == isinstance(error, EngineRefused)
