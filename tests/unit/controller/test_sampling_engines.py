"""Rollouts at engines on Unix sockets: what they may take, and how fast they give it back."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from appliance.controller.bus.bus import Bus
from appliance.controller.bus.load import Load, ModelLoad
from appliance.controller.engines.sampling_engines import SocketEngines
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.records import LineReturned
from appliance.gateway.core.config import Limits
from appliance.gateway.core.router import BATCH_BEHIND
from serve.core import sampling
from tests.unit.gateway.upstreams import DummyUpstream


def table(*replicas: tuple[str, str, str], **fields) -> dict:
    rows = [{"id": name, "socket": path, "version": "v1", "state": state} for name, path, state in replicas]
    row = {"version": "v1", "state": "ready", "task": "generate", "replicas": rows}
    return {"starter": row | fields}


@contextlib.asynccontextmanager
async def engine_of(folder, script):
    engine = await DummyUpstream(str(folder / "e.sock"), script).start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def lines(tmp_path):
    bus = Bus(tmp_path / "bus.sock", ControllerConfig(), first_generation=1)
    made = SocketEngines(bus, Limits(upstream_silence_s=1.0), lambda: None)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(), 32),
        (Load({"r1": 1}), 28),
        (Load({"r1": 9, "r2": 2}), 8),
        (Load({"r1": 4, "r2": 4}), 0),
        (Load(models={"starter": ModelLoad(held=1)}), 0),
        (Load(models={"other": ModelLoad(held=1, inflight=9)}), 32),
    ],
)
async def test_rollouts_take_what_interactive_requests_leave(lines, monkeypatch, load, expected):
    lines._bus.set_models(table(("r1", "/x", "open"), ("r2", "/y", "open")))
    monkeypatch.setattr(lines._bus, "load", lambda: load)
    room = lines.room("starter", "v1")
    assert room.lines == expected and bool(room.why) == (expected == 0)


async def test_rollout_of_a_silent_engine_is_no_death_of_it(tmp_path, lines):
    lines._limits = Limits(upstream_silence_s=0.05)

    async def script(request, reply):
        await asyncio.sleep(60)

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        answer = await lines.sample("starter", "v1", {"model": "private"}, "req_1")
    assert (answer.status, answer.body["error"]["code"], answer.silent) == (504, "engine_timeout", True)


@pytest.mark.parametrize(("died", "yielded"), [(False, True), (True, False)])
async def test_rollout_comes_back_when_its_engine_leaves_the_table_or_dies(lines, tmp_path, died, yielded):
    began, end = asyncio.Event(), asyncio.Event()

    async def script(request, reply):
        began.set()
        await end.wait()
        if not died:
            return
        await reply.json({"error": {"message": "EngineCore encountered an issue", "code": 500}}, 500)

    async with engine_of(tmp_path, script) as engine, asyncio.timeout(60):
        lines._bus.set_models(table(("r1", engine.path, "open")))
        asking = asyncio.create_task(lines.sample("starter", "v1", {"model": "private"}, "req_1"))
        await began.wait()
        if died:
            end.set()
        else:
            lines._bus.set_models(table(("r1", engine.path, "draining")))
        with pytest.raises(LineReturned) as returned:
            await asking
        end.set()
    assert returned.value.yielded is yielded


async def test_rollouts_go_to_engines_of_the_version_that_the_policy_belongs_to(lines, tmp_path):
    seen = []

    async def script(request, reply):
        seen.append(request)
        await reply.json({"choices": []})

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        body = {"model": "private", "token_ids": [1]}
        assert lines.room("starter", "v1").lines == 16
        assert (await lines.sample("starter", "v1", body, "req_1")).status == 200
        assert lines.room("starter", "v2").why == "no engine of the model has its version v2"
        with pytest.raises(LineReturned):
            await lines.sample("starter", "v2", body, "req_2")
    assert [(one.target, one.json) for one in seen] == [(sampling.URL, body | {"priority": 2 * BATCH_BEHIND})]


async def test_rollouts_are_interrupted_at_the_engines_that_have_them(lines, tmp_path):
    seen, open_, interrupted = asyncio.Event(), asyncio.Event(), []

    async def script(request, reply):
        if request.target == sampling.INTERRUPT_URL:
            interrupted.append(request.json)
            open_.set()
        else:
            assert request.headers["x-request-id"] == "req_1"
            seen.set()
            await open_.wait()
        await reply.json({"choices": []})

    async with engine_of(tmp_path, script) as engine, asyncio.timeout(60):
        lines._bus.set_models(table(("r1", engine.path, "open")))
        asking = asyncio.create_task(lines.sample("starter", "v1", {"model": "private"}, "req_1"))
        await seen.wait()
        await lines.interrupt(["req_0", "req_1"])
        assert (await asking).status == 200
        await lines.interrupt(["req_1"])
    assert interrupted == [{"request_ids": ["generate-tokens-req_1"]}], "once, and none that is not there"
    assert not lines._sockets


async def test_an_engine_that_is_gone_is_not_waited_for(lines):
    lines._sockets["req_1"] = "/nowhere"
    await lines.interrupt(["req_1"])
