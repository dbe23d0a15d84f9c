"""Lines of batches at engines on Unix sockets: what they may take, and how fast they give it back."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from appliance.controller.batches import share
from appliance.controller.bus.bus import Bus
from appliance.controller.bus.load import Load, ModelLoad, ReplicaLoad
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.ports import SAMPLING, LineReturned
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.routing.router import BATCH_BEHIND
from appliance.gateway.routing.table import cache_salt
from appliance.wiring import batch_engines
from appliance.wiring.batch_engines import Circumstances, SocketEngines
from scheduler.core.workload import Demand
from serve.core import sampling
from serve.core.sampling import ROLLOUTS
from tests.unit.gateway.upstreams import DummyUpstream

URL = "/v1/chat/completions"
BODY = {"model": "starter", "messages": [{"role": "user", "content": "hi"}]}


def table(*replicas: tuple[str, str, str], **fields) -> dict:
    rows = [{"id": name, "socket": path, "version": "v1", "state": state} for name, path, state in replicas]
    row = {"version": "v1", "task": "generate", "hold_s": 1.0, "replicas": rows}
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
    bus = Bus(tmp_path / "bus.sock", ControllerConfig(), first_generation=1, on_table=lambda: made.load_changed())
    alone = Circumstances("serve", False, 1)
    made = SocketEngines(bus, ControllerConfig(), Limits(), lambda name: name, lambda: alone, lambda: None)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(), 32),
        (Load({"r1": ReplicaLoad(inflight=1)}), 28),
        (Load({"r1": ReplicaLoad(inflight=9), "r2": ReplicaLoad(inflight=2)}), 8),
        (Load({"r1": ReplicaLoad(inflight=4), "r2": ReplicaLoad(inflight=4)}), 0),
        (Load(models={"starter": ModelLoad(held=1)}), 0),
        (Load(models={"other": ModelLoad(held=1, inflight=9)}), 32),
    ],
)
def test_lines_take_what_interactive_requests_leave(load, expected):
    room = share.room({"starter"}, ["r1", "r2"], load, lines_per_engine=16, busy_inflight=4)
    assert room.lines == expected and bool(room.why) == (expected == 0)
    least = share.at_least_one(room)
    assert (least.lines, least.why) == (max(1, expected), room.why)


async def test_an_answer_that_takes_too_long_is_no_death_of_its_engine(tmp_path):
    """It was asked again of a second engine, alone there, as if it had ended the first, and paid for by nobody."""
    bus = Bus(tmp_path / "bus.sock", ControllerConfig(), first_generation=1)
    alone = Circumstances("serve", False, 1)
    made = SocketEngines(bus, ControllerConfig(), Limits(upstream_silence_s=0.05), str, lambda: alone, lambda: None)

    async def script(request, reply):
        await asyncio.sleep(60)

    async with engine_of(tmp_path, script) as engine:
        bus.set_models(table(("r1", engine.path, "open")))
        answer = await made.send("starter", URL, BODY, "req_1")
    await made.close()
    assert (answer.status, answer.body["error"]["code"], answer.silent) == (504, "engine_timeout", True)


def test_without_an_awake_engine_there_is_no_room():
    room = share.room({"starter"}, [], Load(), lines_per_engine=16, busy_inflight=4)
    assert room.lines == 0 and "awake" in room.why


@pytest.mark.parametrize(
    ("policy", "jobs", "others", "free", "expected"),
    [
        ("serve", True, False, 0, True),
        ("split", True, True, 1, True),
        ("serve", False, True, 0, False),
        ("auto", False, False, 8, True),
        ("auto", True, False, 8, False),
        ("train", False, False, 8, False),
    ],
)
def test_a_batch_wakes_a_model_only_where_nobody_is_in_the_way(policy, jobs, others, free, expected):
    assert share.may_wake(policy, jobs, others, free) is expected


@pytest.mark.parametrize(
    ("policy", "floor", "others", "free", "expected"),
    [
        ("split", 0, False, 0, True),
        ("serve", 0, True, 0, False),
        ("auto", 0, False, 0, False),  # it would take a device of the very job that it helps
        ("auto", 1, False, 0, True),
        ("auto", 1, True, 0, False),
        ("auto", 0, False, 1, True),
        ("train", 0, False, 0, False),
        ("train", 1, False, 0, True),
    ],
)
def test_rollouts_wake_a_model_only_on_devices_that_training_does_not_get(policy, floor, others, free, expected):
    assert share.may_wake_to_sample(policy, floor, others, free) is expected


async def test_the_wish_of_rollouts(tmp_path):
    bus = Bus(tmp_path / "bus.sock", ControllerConfig(), first_generation=1, on_table=lambda: None)
    now = Circumstances("auto", True, 0, floor=1)
    hosts = {"adapter": "starter"}
    made = SocketEngines(
        bus, ControllerConfig(), Limits(), lambda name: hosts.get(name, name), lambda: now, lambda: None
    )
    made.wants(["adapter"], SAMPLING)
    assert made.demands()("starter", Demand()).held == 1, "a teacher that is an adapter, by its base's engines"
    made.wants(["starter"], SAMPLING)
    assert made.demands()("starter", Demand()).held == 1 and made.demands()("other", Demand()) == Demand()
    assert made.demands()("starter", Demand(inflight=3)) == Demand(inflight=3), "users speak for themselves"
    now = Circumstances("auto", True, 0)
    assert made.demands()("starter", Demand()) == Demand()
    bus.set_models(table(("r1", "/x", "open")))
    awake = made.demands()("starter", Demand())
    assert awake.requests == 0 and awake.last_request_s is not None, "it stays awake between steps, and claims nothing"


async def test_rollouts_go_to_engines_of_the_version_that_the_policy_belongs_to(lines, tmp_path):
    seen = []

    async def script(request, reply):
        seen.append(request)
        await reply.json({"choices": []})

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        body = {"model": "private", "token_ids": [1]}
        assert lines.sampling_room("starter", "v1").lines == 16
        assert (await lines.sample("starter", "v1", body, "req_1")).status == 200
        assert lines.sampling_room("starter", "v2").why == "no engine of the model has its version v2"
        with pytest.raises(LineReturned):
            await lines.sample("starter", "v2", body, "req_2")
    assert [(one.target, one.json, one.headers["x-appliance-owner"]) for one in seen] == [
        (sampling.URL, body | {"priority": 2 * BATCH_BEHIND}, ROLLOUTS)
    ]
    # No line of a batch gets there, whatever it names.
    answer = await lines.send("starter", sampling.URL, body, "req_3")
    assert answer.status == 404


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
    assert not lines._sampling


async def test_an_engine_that_is_gone_is_not_waited_for(lines):
    lines._sampling["req_1"] = "/nowhere"
    await lines.interrupt(["req_1"])


async def test_the_wish_of_a_batch(lines):
    assert lines.demands()("starter", Demand()) == Demand()
    lines.wants(["starter"])
    assert lines.demands()("starter", Demand()).held == 1
    assert lines.demands()("other", Demand()) == Demand()
    # Interactive requests speak for themselves.
    assert lines.demands()("starter", Demand(inflight=3)) == Demand(inflight=3)
    lines._bus.set_models(table(("r1", "/x", "open")))
    awake = lines.demands()("starter", Demand())
    assert awake.requests == 0 and awake.last_request_s is not None


async def test_a_line_is_asked_like_any_request(lines, tmp_path):
    seen = []

    async def script(request, reply):
        seen.append(request)
        await reply.json({"ok": True, "usage": {"total_tokens": 3}})

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open"), adapter="engine-name"))
        answer = await lines.send("starter", URL, BODY, "req_1")
    assert (answer.status, answer.body["ok"]) == (200, True)
    assert seen[0].target == URL and seen[0].headers["x-request-id"] == "req_1"
    assert seen[0].json["model"] == "engine-name"


async def test_four_streams_of_somebody_keep_nobodys_lines_waiting(lines, monkeypatch):
    """Batches, responses in background and judges of everybody stood still for as long as he liked; a line goes on
    beside them. Rollouts do not: their job's own devices sample sooner than one line at a time."""
    busy = Load({"r1": ReplicaLoad(inflight=4)}, {"starter": ModelLoad(inflight=4, held=1)})
    monkeypatch.setattr(lines._bus, "load", lambda: busy)
    assert lines.room("starter").lines == 0, "no engine is awake"
    lines._bus.set_models(table(("r1", "/nowhere", "open")))
    assert lines.room("starter").lines == 1 and "interactive" in lines.room("starter").why
    assert lines.sampling_room("starter", "v1").lines == 0


async def test_each_owners_lines_have_their_own_turns_in_an_engines_queue(lines, tmp_path):
    """As one owner's, a line waited for all that others had at the engine: by 32 names of one's adapters 512 lines."""
    seen = []

    async def script(request, reply):
        seen.append(request.headers["x-appliance-owner"])
        assert int(request.headers["x-vllm-priority"]) >= BATCH_BEHIND, "behind people"
        await reply.json({"ok": True})

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        for owner, salt in (("ann", "1"), ("ann", "2"), ("ben", "1"), ("", "1")):
            await lines.send("starter", URL, BODY | {"cache_salt": salt}, "req_1", owner=owner)
    assert seen[0] == seen[1] and len({*seen}) == 3 and all("ann" not in one for one in seen)
    assert cache_salt("ann") not in seen, "apart from what she asks a gateway"


async def test_nothing_stays_open_to_engines_that_have_gone(lines, tmp_path):
    async def script(request, reply):
        await reply.json({"ok": True})

    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with engine_of(folder, script) as engine:
            lines._bus.set_models(table((f"r{number}", engine.path, "open")))
            for _ in range(2):
                await lines.send("starter", URL, BODY, "req_1")
                await lines.sample("starter", "v1", BODY, "req_2")
            assert list(lines._clients) == [engine.path]


async def test_the_gateways_checks_hold(lines):
    lines._bus.set_models(table(("r1", "/nowhere", "open")))
    answer = await lines.send("starter", URL, BODY | {"chat_template": "{{ x }}"}, "req_1")
    assert answer.status == 400 and answer.body["error"]["code"] == "unsupported_parameter"


async def test_the_loop_is_free_between_two_checks(lines, monkeypatch):
    """Sixteen lines whose form takes 50 ms each held up everybody for a second."""
    lines._bus.set_models(table(("r1", "/nowhere", "open")))
    turn, checked_in = 0, []

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def check(url: str, content: bytes) -> bytes:
        checked_in.append(turn)
        raise gateway_errors.bad_request("no", param="n")

    monkeypatch.setattr(lines, "_check", check)
    counting = asyncio.create_task(count())
    await asyncio.gather(*(lines.send("starter", URL, BODY, f"req_{number}") for number in range(8)))
    counting.cancel()
    assert len(set(checked_in)) == 8


async def test_the_loop_is_free_between_two_long_answers(lines, tmp_path, monkeypatch):
    """Sixteen of 5 MB that ended with the same step of their engine held up everybody for more than a second."""
    together, turn, read_in = asyncio.Event(), 0, []

    async def script(request, reply):
        if len(engine.requests) == 8:
            together.set()
        await together.wait()
        await reply.json({"text": "x" * 2 * batch_engines._LONG_BYTES})

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    read = batch_engines._answer
    monkeypatch.setattr(batch_engines, "_answer", lambda asking: (read_in.append(turn), read(asking))[1])
    ask, ended = httpx.AsyncClient.post, asyncio.Barrier(8)

    async def ends_with_the_others(*args, **named):
        answer = await ask(*args, **named)
        await ended.wait()
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "post", ends_with_the_others)
    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        counting = asyncio.create_task(count())
        told = await asyncio.gather(*(lines.send("starter", URL, BODY, f"req_{number}") for number in range(8)))
        counting.cancel()
    assert {answer.status for answer in told} == {200}
    assert len(set(read_in)) == 8, "others had a turn between two answers"


async def test_what_was_put_together_is_no_larger_than_what_a_gateway_reads(lines):
    lines._bus.set_models(table(("r1", "/nowhere", "open")))
    long = {"model": "starter", "messages": [{"role": "user", "content": "x" * Limits().inference_body_bytes}]}
    answer = await lines.send("starter", URL, long, "req_1")
    assert (answer.status, answer.body["error"]["code"]) == (413, "request_too_large")


async def test_an_engines_refusal_is_an_answer_in_openais_shape(lines, tmp_path):
    async def script(request, reply):
        await reply.json({"error": {"message": "too long: maximum context length", "code": 400}}, 400)

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        answer = await lines.send("starter", URL, BODY, "req_1")
    assert answer.status == 400 and answer.body["error"]["code"] == "context_length_exceeded"


async def test_an_answer_that_is_no_json_is_an_answer_too(lines, tmp_path):
    """An exception lost the line: it was neither answered nor paid for, and its batch was complete without it."""

    async def script(request, reply):
        await reply.json(b"\x00\x01 no json")

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        answer = await lines.send("starter", URL, BODY, "req_1")
    assert (answer.status, answer.body["error"]["code"]) == (502, "engine_failed")


async def test_lines_come_back_the_moment_their_engine_leaves_the_table(lines, tmp_path):
    asked = asyncio.Event()

    async def script(request, reply):
        asked.set()
        await asyncio.Event().wait()

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        sending = asyncio.create_task(lines.send("starter", URL, BODY, "req_1"))
        async with asyncio.timeout(60):
            await asked.wait()
            lines._bus.set_models(table(("r1", engine.path, "draining")))
            with pytest.raises(LineReturned) as returned:
                await sending
            await engine.lost.wait()  # the engine sees the end of the connection, and stops working on it
        assert returned.value.yielded
        with pytest.raises(LineReturned):
            await lines.send("starter", URL, BODY, "req_2")


async def test_an_engine_that_dies_returns_its_line(lines, tmp_path):
    async def script(request, reply):
        reply.die()

    async with engine_of(tmp_path, script) as engine:
        lines._bus.set_models(table(("r1", engine.path, "open")))
        with pytest.raises(LineReturned) as returned:
            await lines.send("starter", URL, BODY, "req_1")
        assert not returned.value.yielded
    with pytest.raises(LineReturned) as returned:
        await lines.send("starter", URL, BODY, "req_1")
    assert returned.value.yielded


async def test_a_line_that_goes_alone_waits_for_the_others_and_keeps_new_ones_out(lines, tmp_path):
    gates = {"before": asyncio.Event(), "alone": asyncio.Event()}
    seen: list[str] = []

    async def script(request, reply):
        seen.append(request.json["user"])
        await gates[request.json["user"]].wait()
        await reply.json({"ok": True})

    async with engine_of(tmp_path, script) as engine, asyncio.timeout(60):
        lines._bus.set_models(table(("r1", engine.path, "open")))
        before = asyncio.create_task(lines.send("starter", URL, BODY | {"user": "before"}, "req_1"))
        while not seen:
            await asyncio.sleep(0)
        alone = asyncio.create_task(lines.send("starter", URL, BODY | {"user": "alone"}, "req_2", alone=True))
        while lines.room("starter").lines:
            await asyncio.sleep(0)
        assert seen == ["before"] and "kept" in lines.room("starter").why
        gates["before"].set()
        while len(seen) < 2:
            await asyncio.sleep(0)
        assert (await before).status == 200 and seen == ["before", "alone"]
        for more in ({}, {"alone": True}):
            with pytest.raises(LineReturned, match="kept for one line") as returned:
                await lines.send("starter", URL, BODY | {"user": "late"}, "req_3", **more)
            assert returned.value.yielded
        gates["alone"].set()
        assert (await alone).status == 200 and lines.room("starter").lines == 16


async def test_a_line_that_waits_to_go_alone_comes_back_when_its_engine_is_wanted(lines, tmp_path):
    async def script(request, reply):
        await asyncio.Event().wait()

    async with engine_of(tmp_path, script) as engine, asyncio.timeout(60):
        lines._bus.set_models(table(("r1", engine.path, "open")))
        sending = [
            asyncio.create_task(lines.send("starter", URL, BODY, f"req_{n}", alone=alone))
            for n, alone in enumerate((False, True))
        ]
        while not lines._lines or not lines._kept_for_one:
            await asyncio.sleep(0)
        lines._bus.set_models(table(("r1", engine.path, "draining")))
        for returned in await asyncio.gather(*sending, return_exceptions=True):
            assert isinstance(returned, LineReturned) and returned.yielded
        assert not lines._kept_for_one


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"background": True}])
async def test_a_line_goes_on_from_nothing_and_is_in_no_background(lines, field):
    lines._bus.set_models(table(("r1", "/nowhere", "open")))
    answer = await lines.send("starter", "/v1/responses", {"model": "starter", "input": "x", **field}, "req_1")
    assert answer.status == 400 and answer.body["error"]["param"] == next(iter(field))


async def test_each_asker_wants_its_own(lines):
    lines.wants(["starter"])
    lines.wants(["other"], "background responses")
    lines.wants([])
    assert lines.demands()("starter", Demand()) == Demand() and lines.demands()("other", Demand()).held == 1


async def test_who_is_wanted_is_looked_up_once_in_a_round_however_many_models_there_are(tmp_path):
    """Each of 10,000 checkpoints went through the 200 models that lines wanted: half a second of each round."""
    bus = Bus(tmp_path / "bus.sock", ControllerConfig(), first_generation=1)
    bus.set_models(table())
    asked = []

    def hosts(name: str) -> str:
        asked.append(name)
        return name

    def circumstances() -> Circumstances:
        asked.append("circumstances")
        return Circumstances("serve", False, 1)

    made = SocketEngines(bus, ControllerConfig(), Limits(), hosts, circumstances, lambda: None)
    wanted = [f"model-{number}" for number in range(20)]
    made.wants(wanted)
    made.wants(wanted[:5], SAMPLING)
    demand = made.demands()
    held = [demand(f"model-{number}", Demand()).held for number in range(1000)]
    assert held == [1] * 20 + [0] * 980
    assert len(asked) == 20 + 5 + 1
