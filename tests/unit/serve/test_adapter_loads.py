"""An engine's front end finds adapters and asks its core for one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve.adapters import adapters, load_turns
from serve.adapters.adapters import EngineAdapters
from serve.api import answer_version
from weights.format.names import encode_name, policy_name
from weights.tiers import copies


class Engine:
    """Stands for vLLM's AsyncLLM, whose core takes `took_s` for each adapter, and none is loaded until `go`. vLLM calls
    `resolve_lora` as in `asked`."""

    def __init__(self, root: Path, took_s: float = 0.0, busy: bool = False) -> None:
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: busy, request_states={})
        self.took_s, self.at_once, self.most, self.clock = took_s, 0, 0, [1000.0]
        self.loaded: list[str] = []
        self.removed: list[int] = []
        self.go, self.for_rollouts = asyncio.Event(), False
        self.table: Any = SimpleNamespace(base_model_paths=[SimpleNamespace(name="starter")])
        self.root = root / "adapters"
        self.adapters = EngineAdapters(
            self,  # type: ignore[arg-type]
            self.table,
            [str(self.root)],
            4,
            "",
            1.0,
            lambda: self.for_rollouts,
            asker,
            answer_version.uses,
            answer_version.unbegun,
        )
        self.adapters.serve_on(str(root / "versions" / "starter" / "v1"))

    async def add_lora(self, request: Any) -> bool:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await self.go.wait()
        self.loaded.append(request.lora_name.partition("@")[0])
        self.at_once -= 1
        self.clock[0] += self.took_s
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True

    def made(self, model: str, version: str = "v1") -> str:
        path = self.root / encode_name(model) / version
        path.mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
        meta = {"base": "starter", "base_version": "v1"}
        copies.seal_dir(path, kind="adapter", model=model, version=version, meta=meta)
        return f"{model}@{version}"

    async def asked(self, name: str) -> Any:
        found = await self.adapters.resolve_lora("starter", name)
        if found is not None:
            found.lora_int_id = len(self.loaded) + 1
            await self.add_lora(found)
            self.table.lora_requests[name] = found
        return found


def asker() -> str:
    """The owner: the first word of a task's name."""
    task = asyncio.current_task()
    assert task is not None
    return task.get_name().partition("-")[0]


def asking(engine: Engine, names: list[str]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(engine.asked(engine.made(name)), name=name) for name in names]


async def until(there: Any) -> None:
    for _ in range(10_000):
        if there():
            return
        await asyncio.sleep(0.001)
    raise AssertionError


async def test_an_adapter_in_training_is_only_there_for_rollouts(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.go.set()
    name = engine.made(policy_name("ftjob-1"), "step-3.ab")
    assert await engine.asked(name) is None
    engine.for_rollouts = True
    found = await engine.asked(name)
    assert found is not None and found.lora_path.endswith("step-3.ab")
    assert name in engine.table.lora_requests
    engine.for_rollouts = False
    assert name not in engine.table.lora_requests, "not even while it is loaded"


async def test_one_adapter_is_loaded_at_a_time_and_owners_take_turns(tmp_path: Path) -> None:
    """All that were asked for together were loaded before the engine's next step."""
    engine = Engine(tmp_path)
    tasks = asking(engine, [*(f"ann-{number}" for number in range(12)), "ben-0", "ben-1"])
    await until(lambda: len(engine.adapters._waiting) == 13)
    engine.go.set()
    assert all(await asyncio.gather(*tasks))
    assert engine.most == 1 and len(engine.loaded) == 14
    first, second = (place for place, name in enumerate(engine.loaded) if name.startswith("ben"))
    assert first < 3 and second < 5, engine.loaded


@pytest.mark.parametrize("busy", [False, True])
async def test_steps_go_on_between_two_loads_while_anybody_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    engine, slept = Engine(tmp_path, took_s=30.0, busy=busy), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(load_turns, "time", SimpleNamespace(monotonic=lambda: engine.clock[0] + sum(slept)))
    monkeypatch.setattr(load_turns, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    engine.go.set()
    for number in range(2):
        assert await engine.asked(engine.made(f"ann-{number}"))
    assert slept == ([30.0] if busy else [])


async def test_who_leaves_has_his_adapter_loaded_before_the_next_one_is(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    [left] = asking(engine, ["ann-0"])
    await until(lambda: engine.at_once)
    [waits] = asking(engine, ["ann-1"])
    await until(lambda: engine.adapters._waiting)
    left.cancel()
    await asyncio.sleep(0.01)
    assert engine.most == 1 and not left.done(), "its core is at it"
    engine.go.set()
    assert await waits
    assert left.cancelled() and engine.loaded == ["ann-0", "ann-1"] and engine.most == 1


async def test_an_adapter_that_waits_for_its_turn_does_not_come_to_other_weights(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    [first] = asking(engine, ["ann-0"])
    await until(lambda: engine.at_once)  # both look for their files in threads, so either could be the first
    [waits] = asking(engine, ["ben-0"])
    await until(lambda: engine.adapters._waiting)
    await engine.adapters.close(1.0)
    engine.go.set()
    await first
    assert await waits is None and engine.loaded == ["ann-0"]
    assert set(engine.removed) <= {1, adapters.NO_NUMBER}
    engine.adapters.serve_on(str(tmp_path / "versions" / "starter" / "v1"))
    assert await engine.asked("ben-0@v1"), "the turn was given back"


async def test_an_adapter_is_not_resolved_while_it_is_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late request leased and loaded it again, and closed the lease of those that the unload waited for."""
    engine, look, looks = Engine(tmp_path), asyncio.Event(), asyncio.Event()
    engine.go.set()
    found = await engine.asked(engine.made("ann-0"))
    leased = engine.adapters._leased

    async def slowly(model: str, version: str) -> Any:
        there = await leased(model, version)
        looks.set()
        await look.wait()
        return there

    monkeypatch.setattr(engine.adapters, "_leased", slowly)
    states = engine.output_processor.request_states
    states["r"] = SimpleNamespace(lora_request=found)
    late = asyncio.create_task(engine.asked("ann-0@v1"))
    await looks.wait()
    unloads = [asyncio.create_task(engine.adapters.unload("ann-0@v1", 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    look.set()
    assert await late is None and await engine.asked("ann-0@v1") is None
    assert engine.adapters._known["ann-0@v1"].request is found
    states.clear()
    assert await asyncio.gather(*unloads) == [True, True]
    assert engine.removed == [1] and engine.loaded == ["ann-0"], "once"


async def test_an_adapter_that_a_request_has_found_is_not_unloaded_before_the_engine_has_it(tmp_path: Path) -> None:
    """One whose adapter was unloaded meanwhile ended the engine."""
    engine, found, begun, end = Engine(tmp_path), asyncio.Event(), asyncio.Event(), asyncio.Event()
    engine.go.set()
    name = engine.made("ann-0")
    assert await engine.asked(name)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert name in engine.table.lora_requests
        found.set()
        await begun.wait()
        answer = answer_version.current()
        assert answer is not None
        answer.begun = True
        await end.wait()

    scope = {"type": "http", "headers": []}
    request = asyncio.create_task(answer_version.AnswerVersions(app)(scope, None, None))
    await found.wait()
    assert answer_version.unbegun() == {name: 1}
    unload = asyncio.create_task(engine.adapters.unload(name, 60.0))
    await asyncio.sleep(0.03)
    assert not unload.done()
    begun.set()
    assert await unload and not answer_version.unbegun(), "the engine's own table counts it from now on"
    end.set()
    await request
