"""Replicas whose supervisors or engines are stopped: what a look at the box says of them, and of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.core.errors import EffectFailed
from scheduler.ray import actors as ray_actors
from scheduler.ray import effects
from scheduler.ray.effects import REPLICA, RayEffects
from serve.core.config import EngineConfig
from serve.core.sizing import NotServable


class Supervisor:
    """The body of an actor. `stopped`: it answers nothing from now on."""

    def __init__(self, index: int):
        self.stopped, self.index, self.state = False, index, "ready"
        self.dead: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        async def remote(*_: Any) -> Any:
            if method == "wait_dead":
                return await self.dead
            if self.stopped:
                await asyncio.Event().wait()
            if method == "life":
                return {}
            return {
                "state": self.state,
                "model": "m",
                "version": "v1",
                "node": "n0",
                "settings": "",
                "devices": [self.index],
                "rss_bytes": 7,
                "address": "/r",
            }

        return SimpleNamespace(remote=remote)


@pytest.fixture
async def two(monkeypatch):
    actors = {f"{REPLICA}r{n}": Supervisor(n) for n in range(2)}

    async def names() -> list[str]:
        return list(actors)

    monkeypatch.setattr(effects, "actor_names", names)
    monkeypatch.setattr(effects, "find_actor", actors.get)
    monkeypatch.setattr(ray_actors, "LOOK_S", 0.02)
    monkeypatch.setattr(ray_actors, "ANSWER_S", 0.05)
    nodes = SimpleNamespace(config=lambda node: None)
    routing = SimpleNamespace(version=lambda replica_id: "v1", close=lambda replica_id: None)
    found = RayEffects(nodes, routing, None, None, EngineConfig())
    yield found, list(actors.values())
    for engine in found._engines.values():
        if engine.watcher is not None:
            engine.watcher.cancel()


async def test_one_that_is_stopped_hides_no_other_and_is_as_it_was_seen_last(two):
    found, supervisors = two
    before = await found.observe_replicas()
    assert [(replica.state, replica.answered) for replica in before] == [("open", True)] * 2
    supervisors[0].stopped = True
    after = await found.observe_replicas()
    assert after[1] == before[1] and not after[0].answered
    assert found.resident_bytes() == {"r0": 7, "r1": 7}


async def test_stop_everything_names_the_engine_that_did_not_stop(two, monkeypatch, caplog):
    found, supervisors = two
    await found.observe_replicas()

    async def fails(replica_id):
        if replica_id == "r1":
            raise EffectFailed("Ray still lists its actor")

    monkeypatch.setattr(found, "stop_replica", fails)
    await found.stop_everything()
    assert [record.getMessage() for record in caplog.records] == [
        "replica r1 was not stopped: Ray still lists its actor"
    ]


async def test_one_that_serves_another_version_than_gateways_know_is_told_to_them(two):
    found, told = two[0], []

    async def opened(*of: str) -> None:
        told.append(of)

    found._routing = SimpleNamespace(version=lambda replica_id: "v0" if replica_id == "r0" else "v1", open=opened)
    assert {replica.state for replica in await found.observe_replicas()} == {"open"}
    assert told == [("r0", "m", "v1", "/r")]


async def test_one_that_nobody_knows_yet_is_waited_for(two):
    """After a restart of the controller its devices would look free."""
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
def test_a_model_that_no_longer_fits_fails_its_start_and_not_the_scheduler(
    error: Exception, says: str, blame: str
) -> None:
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
