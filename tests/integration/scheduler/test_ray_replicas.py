"""Supervisors and replicas: calls end when the supervisor dies, and a silent supervisor hides no other."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from runtime.errors import ChildDied, ChildTimeout, SupervisorDied, WarmParentError
from scheduler.core.errors import EffectFailed
from scheduler.ray import actors, effects
from scheduler.ray.actors import Supervisor, blame_of, errors_as_failures
from scheduler.ray.effects import REPLICA, RayEffects
from serve.core.config import EngineConfig
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
from serve.core.sizing import NotServable
from tests.unit.scheduler.fakes import Handle, in_virtual_time
from train.plan.errors import RankFailed


def actor(**methods: Callable[..., Any]) -> Handle:
    """Return an actor handle with these methods."""

    def method(answer: Callable[..., Any]) -> Callable[..., Any]:
        async def body(*arguments: Any) -> Any:
            made = answer(*arguments)
            return await made if asyncio.iscoroutine(made) else made

        return body

    return Handle(SimpleNamespace(**{name: method(answer) for name, answer in {"life": dict, **methods}.items()}))


def raising(error: BaseException) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        raise error

    return answer


async def never(*arguments: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def killed(monkeypatch) -> list[Handle]:
    found: list[Handle] = []
    monkeypatch.setattr(actors.ray, "kill", found.append)
    return found


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed by the memory monitor")])
async def test_each_error_of_a_dead_actor_raises_supervisor_died(error) -> None:
    supervisor = Supervisor(actor(work=raising(error)), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert supervisor.over


async def test_unreachable_supervisor_can_be_called_again() -> None:
    answers = iter([raising(ActorUnavailableError("lost the connection", None)), lambda: 1])
    supervisor = Supervisor(actor(work=lambda: next(answers)()), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert await supervisor.call("work") == 1


@in_virtual_time
async def test_supervisor_that_stays_silent_is_killed(killed) -> None:
    lives = iter([lambda: {}])
    silent = actor(work=never, life=lambda: next(lives, never)())
    supervisor = Supervisor(silent, "r")
    with pytest.raises(SupervisorDied, match="it did not answer"):
        await supervisor.call("work")
    assert killed == [silent] and supervisor.over


@in_virtual_time
async def test_supervisor_that_dies_ends_calls_that_ray_does_not_answer(killed) -> None:
    lives = iter([lambda: {}])
    supervisor = Supervisor(actor(work=never, life=lambda: next(lives, raising(ActorDiedError()))()), "r")
    with pytest.raises(SupervisorDied):
        await supervisor.call("work")
    assert supervisor.over and not killed


@in_virtual_time
async def test_supervisor_that_has_not_started_is_not_killed(killed) -> None:
    begun = asyncio.Event()

    async def work() -> int:
        await begun.wait()
        return 5

    calling = asyncio.create_task(Supervisor(actor(work=work, life=begun.wait), "r").call("work"))
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
        (RankFailed(0, "raised ValueError", blame="own"), "own"),
        (RankFailed(0, "died"), "outside"),
        (RankFailed(0, "raised InvalidTrainingData", retryable=False), "input"),
    ],
)
async def test_errors_map_to_blame(error, blame) -> None:
    assert blame_of(error) == blame
    for raised in (error, RayTaskError("work", "traceback", error).as_instanceof_cause()):
        with pytest.raises(EffectFailed) as failed, errors_as_failures():
            await actor(work=raising(raised)).work.remote()
        assert failed.value.blame == blame, raised
        assert failed.value.of_settings == isinstance(error, EngineRefused)


class Engine:
    """The body of a supervisor. `stopped`: it no longer answers."""

    def __init__(self, index: int):
        self.stopped, self.index = False, index
        self.dead: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> Any:
        return await self.dead

    async def life(self) -> Any:
        return {} if not self.stopped else await never()

    async def status(self) -> Any:
        about = {"model": "m", "version": "v1", "node": "n0", "settings": "", "rss_bytes": 7, "address": "/r"}
        return {"state": "ready", "devices": [self.index], **about} if not self.stopped else await never()


@pytest.fixture
async def two(monkeypatch):
    bodies = [Engine(n) for n in range(2)]
    handles = {f"{REPLICA}r{n}": Handle(body) for n, body in enumerate(bodies)}
    monkeypatch.setattr(effects, "actor_names", AsyncMock(return_value=list(handles)))
    monkeypatch.setattr(effects, "find_actor", handles.get)
    monkeypatch.setattr(actors, "LOOK_S", 0.02)
    monkeypatch.setattr(actors, "ANSWER_S", 0.05)
    nodes = SimpleNamespace(config=lambda node: None)
    routing = SimpleNamespace(version=lambda replica_id: "v1", close=lambda replica_id: None)
    found = RayEffects(nodes, routing, None, None, EngineConfig())
    yield found, bodies
    for engine in found._engines.values():
        if engine.watcher is not None:
            engine.watcher.cancel()


async def test_stopped_supervisor_keeps_its_last_observed_state(two):
    found, supervisors = two
    before = await found.observe_replicas()
    assert [(replica.state, replica.answered) for replica in before] == [("open", True)] * 2
    supervisors[0].stopped = True
    after = await found.observe_replicas()
    assert after[1] == before[1] and not after[0].answered
    assert found.resident_bytes() == {"r0": 7, "r1": 7}


async def test_stop_everything_names_engine_that_did_not_stop(two, monkeypatch, caplog):
    found, supervisors = two
    await found.observe_replicas()

    monkeypatch.setattr(found, "stop_replica", AsyncMock(side_effect=[None, EffectFailed("Ray still lists its actor")]))
    await found.stop_everything()
    (record,) = caplog.records
    assert "r1" in record.getMessage() and "Ray still lists its actor" in record.getMessage()


async def test_observe_corrects_wrong_version_in_routing(two):
    found, opened = two[0], AsyncMock()
    found._routing = SimpleNamespace(version=lambda replica_id: "v0" if replica_id == "r0" else "v1", open=opened)
    assert {replica.state for replica in await found.observe_replicas()} == {"open"}
    opened.assert_called_once_with("r0", "m", "v1", "/r")


async def test_observe_fails_until_unknown_engine_answers(two):
    """Otherwise its devices would look free after a restart of the controller."""
    found, supervisors = two
    supervisors[0].stopped = True
    with pytest.raises(EffectFailed, match="replica:r0 has not answered"):
        await found.observe_replicas()


@pytest.mark.parametrize(
    "error, says, blame",
    [
        (NotServable("0 of 8,192 tokens"), "m cannot be served: 0 of 8,192 tokens$", "input"),
        (LookupError("gone"), "m cannot be served: gone$", "own"),
    ],
)
def test_start_of_model_that_no_longer_fits_raises_effect_failed(error: Exception, says: str, blame: str) -> None:
    def refuses(model: str, tensor_parallel: int) -> dict:
        raise error

    device = SimpleNamespace(index=0, kind="cpu")
    replicas = RayEffects(
        SimpleNamespace(device=lambda device_id: device, home=SimpleNamespace(name="n0")),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        SimpleNamespace(engine_settings=refuses),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        EngineConfig(),
    )
    order = SimpleNamespace(id="r1-0", model="m", devices=("n0/0",))
    with pytest.raises(EffectFailed, match=says) as failed:
        replicas._replica_spec(order, SimpleNamespace(name="n0"), Path("/v"))  # type: ignore[arg-type]
    assert failed.value.blame == blame
