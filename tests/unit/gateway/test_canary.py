"""A share of a model's requests goes to its canary; what fails there is the canary's, not the client's."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from zlib import crc32

import pytest

from appliance.gateway.routing.router import Router, Work
from appliance.gateway.routing.table import Canary, Model, Replica
from appliance.gateway.state.reports import load_report

from .conftest import Box, Start, chat
from .test_continuation import greedy_engine
from .upstreams import Reply, UpstreamRequest, chat_answer, chat_events, sends


async def split(box: Box, share: float, hold_s: float = 30.0, **canary_states: str) -> None:
    """ "m" v1 on e0, and its canary v2 on e1."""
    for name in ("e0", "e1"):
        if name not in box.engines:
            await box.engine(name)
    box.serve("m", "e0", hold_s=hold_s)
    box.serve("m@v2", **(canary_states or {"e1": "open"}))
    for replica in box.models["m@v2"]["replicas"]:
        replica["version"] = "v2"
    box.models["m"]["canary"] = {"name": "m@v2", "version": "v2", "share": share, "since_s": 5.0}
    box.apply()


def asked(i: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"conversation {i}"}]}


async def refuses_all(request: UpstreamRequest, reply: Reply) -> None:
    await reply.json({"error": {"message": "no", "type": "x", "code": 400}}, 400)


async def test_conversations_keep_their_version_and_the_header_names_it(start_box: Start) -> None:
    box = await start_box()
    await split(box, 0.3)
    versions = []
    for i in range(40):
        first = await box.ask("POST", "/v1/chat/completions", asked(i))
        turn = asked(i)
        turn["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and then?"}]
        second = await box.ask("POST", "/v1/chat/completions", turn)
        assert first.status == second.status == 200
        assert first.headers["x-appliance-model-version"] == second.headers["x-appliance-model-version"]
        versions.append(first.headers["x-appliance-model-version"])
    assert 4 <= versions.count("v2") <= 22
    assert {request.json["model"] for request in box.engines["e1"].requests} == {"m@v2"}, "as its engine knows it"
    assert {request.json["model"] for request in box.engines["e0"].requests} == {"m"}
    counts = load_report(box.state)["canaries"]["m"]
    assert counts["since_s"] == 5.0 and {v: list(c["asked"].values()) for v, c in counts["versions"].items()} == {
        "v1": [[2 * versions.count("v1"), 0]],
        "v2": [[2 * versions.count("v2"), 0]],
    }
    (times,) = counts["versions"]["v2"]["owners"].values()
    assert sum(times["first_byte"].values()) == sum(times["duration"].values()) == 2 * versions.count("v2")


@pytest.mark.parametrize(("code", "counted"), [(400, []), (500, [[[1, 1]]])])
async def test_a_stream_that_ends_for_its_requests_own_fault_counts_for_no_version(
    start_box: Start, code: int, counted: list[list[list[int]]]
) -> None:
    """Whoever asked for what engines end had the canary rolled back; 50 refusals were its least number."""
    box = await start_box()
    await split(box, 1.0)
    error = b'data: {"error":{"message":"no","type":"x","code":%d}}\n\ndata: [DONE]\n\n' % code
    box.engines["e1"].script = sends(*chat_events("a", done=False), error)
    assert (await box.ask("POST", "/v1/chat/completions", {**asked(1), "stream": True})).status == 200
    versions = load_report(box.state)["canaries"]["m"]["versions"].values()
    assert [list(counts["asked"].values()) for counts in versions] == counted


async def test_nothing_waits_for_a_canary(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0, e1="draining")
    response = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert (response.status, response.headers["x-appliance-model-version"]) == (200, "v1")
    assert box.state.metrics.events["held"] == 0


async def test_what_dies_on_the_canary_is_answered_by_the_other_version_and_counts_for_the_canary(
    start_box: Start,
) -> None:
    box = await start_box()
    await split(box, 1.0)

    async def dies(request: UpstreamRequest, reply: Reply) -> None:
        reply.die()

    box.engines["e1"].script = dies
    response = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert (response.status, response.headers["x-appliance-model-version"]) == (200, "v1")
    versions = load_report(box.state)["canaries"]["m"]["versions"]
    assert {name: list(of["asked"].values()) for name, of in versions.items()} == {"v2": [[1, 1]], "v1": [[1, 0]]}


async def test_answers_of_500_are_errors_and_of_400_count_for_no_version(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0)

    async def script(request: UpstreamRequest, reply: Reply) -> None:
        status = request.json["seed"]
        await reply.json(
            {"error": {"message": "no", "type": "x", "code": status}} if status > 200 else chat_answer(), status
        )

    box.engines["e0"].script = box.engines["e1"].script = script
    for status in (200, 400, 500):
        assert (await box.ask("POST", "/v1/chat/completions", asked(1) | {"seed": status})).status == status
    counts = load_report(box.state)["canaries"]["m"]["versions"]["v2"]
    assert list(counts["asked"].values()) == [[2, 1]] and not counts["refused"]
    metrics = (await box.ask("GET", "/metrics")).body.decode()
    assert 'appliance_gateway_canary_errors{model="m",version="v2"} 1' in metrics


@pytest.mark.parametrize("how", ["whole", "stream", "first event"])
async def test_what_the_canary_alone_refuses_is_answered_by_the_other_version(start_box: Start, how: str) -> None:
    """A version that answered 400 to everything failed nobody's requests, and was neither rolled back nor promoted."""
    box = await start_box()
    await split(box, 1.0)

    async def refuses(request: UpstreamRequest, reply: Reply) -> None:
        if how == "first event":
            error = {"error": {"message": "no", "type": "x", "code": 400}}
            await sends(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(error, separators=(",", ":")).encode())(
                request, reply
            )
        else:
            await refuses_all(request, reply)

    box.engines["e1"].script = refuses
    if how != "whole":
        box.engines["e0"].script = sends(*chat_events("a"))
    answer = await box.ask("POST", "/v1/chat/completions", asked(1) | {"stream": how != "whole"})
    assert answer.status == 200 and b"error" not in answer.body
    versions = load_report(box.state)["canaries"]["m"]["versions"]
    assert {name: list(of["asked"].values()) for name, of in versions.items()} == {"v2": [], "v1": [[1, 0]]}
    assert list(versions["v2"]["refused"].values()) == [1] and not versions["v1"]["refused"]
    assert (
        'appliance_gateway_canary_requests{model="m",version="v2"} 0'
        in (await box.ask("GET", "/metrics")).body.decode()
    )


async def test_what_a_canary_refused_counts_also_where_the_others_stream_is_continued(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0)
    box.engines["e1"].script = refuses_all
    box.engines["e0"].script = greedy_engine({"tokens": 2})
    answer = await box.ask(
        "POST", "/v1/chat/completions", asked(1) | {"stream": True, "temperature": 0, "max_tokens": 9}
    )
    assert answer.status == 200 and b"error" not in answer.body and box.state.metrics.events["continued"] == 1
    versions = load_report(box.state)["canaries"]["m"]["versions"]
    assert list(versions["v2"]["refused"].values()) == [1]


async def test_what_the_canary_refuses_does_not_wait_for_the_other_versions_engine(start_box: Start) -> None:
    """The client's own mistake waited for an engine that was asleep, and was answered "not ready"."""
    box = await start_box()
    await split(box, 1.0)
    box.serve("m", e0="draining")
    box.models["m"]["canary"] = {"name": "m@v2", "version": "v2", "share": 1.0, "since_s": 5.0}
    box.apply()
    box.engines["e1"].script = refuses_all
    answer = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert answer.status == 400 and box.state.metrics.events["held"] == 0
    assert load_report(box.state)["canaries"]["m"]["versions"] == {}


async def test_who_was_refused_by_the_canary_hears_that_if_the_other_version_has_no_room_in_time(
    start_box: Start,
) -> None:
    box = await start_box(holds={"hold_s": 0.05})
    await split(box, 1.0)
    box.engines["e1"].script = refuses_all
    assert box.state.router.choose("m", Work(sequences=box.state.router.max_inflight), 0.0)
    answer = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert answer.status == 400 and box.state.metrics.events["hold_refused"] == 1


async def test_counts_begin_anew_with_another_canary_and_end_with_it(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0)
    await box.ask("POST", "/v1/chat/completions", chat())
    box.models["m"]["canary"]["share"] = 0.5
    box.apply()
    assert load_report(box.state)["canaries"]["m"]["versions"], "only its share changed"
    box.models["m"]["canary"]["since_s"] = 6.0
    box.apply()
    assert load_report(box.state)["canaries"]["m"] == {"since_s": 6.0, "versions": {}}
    del box.models["m"]["canary"]
    box.apply()
    assert load_report(box.state)["canaries"] == {}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_share_is_met_over_many_conversations(share: float) -> None:
    router = Router(max_inflight=10)
    replica = Replica("r1", "/s", "v1", "open")
    router.apply(
        [
            Model("m", "v1", "ready", "generate", 1.0, (replica,), canary=Canary("m@v2", share, 1.0)),
            Model("m@v2", "v2", "ready", "generate", 1.0),
        ]
    )
    prompts = [b"You are helpful.\nquestion %d" % i for i in range(20_000)]
    found = sum(router.canary_for("m", "key_1", crc32(prompt)) is not None for prompt in prompts)
    assert found / len(prompts) == pytest.approx(share, rel=0.25)
    same = crc32(b"the same prompt")
    keys = sum(router.canary_for("m", f"key_{i}", same) is not None for i in range(20_000))
    assert keys / 20_000 == pytest.approx(share, rel=0.25)


async def test_a_version_by_its_name(box: Box) -> None:
    box.models["m@v1"] = {**box.models["m"], "adapter": "m"}
    box.models["m"]["canary"] = None
    box.apply()
    ask = {"model": "m@v1", "messages": [{"role": "user", "content": "hi"}]}
    answer = await box.ask("POST", "/v1/chat/completions", ask)
    assert (answer.status, answer.headers["x-appliance-model-version"]) == (200, "v1")
    assert box.engines["e0"].requests[0].json["model"] == "m", "as its engine knows it"
    assert box.state.spending.take_sums()[0]["model"] == "m"
    missing = await box.ask("POST", "/v1/chat/completions", ask | {"model": "m@v9"})
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_version_not_served", "model")
    assert "`v1` is" in missing.error["message"]
    assert "appliance model rollback m --version" in missing.error["message"]
    none = await box.ask("POST", "/v1/chat/completions", ask | {"model": "m@challenger"})
    assert none.error["code"] == "model_version_not_served"
    unknown = await box.ask("POST", "/v1/chat/completions", ask | {"model": "x@v9"})
    assert unknown.error["code"] == "model_not_found"


async def test_a_version_by_its_name_for_keys_with_a_list(box: Box) -> None:
    box.models["m@v1"] = {**box.models["m"], "adapter": "m"}
    ask = {"model": "m@v1", "messages": [{"role": "user", "content": "hi"}]}
    box.limit(models=["m"])
    assert (await box.ask("POST", "/v1/chat/completions", ask)).status == 200
    box.limit(models=["other"])
    for name in ("m@v1", "m@v9"):
        assert (await box.ask("POST", "/v1/chat/completions", ask | {"model": name})).error["code"] == "model_not_found"


async def test_a_version_that_goes_while_a_request_for_it_is_held(box: Box) -> None:
    box.models["m@v1"] = {**box.models["m"], "adapter": "m", "replicas": []}
    box.apply()
    call = asyncio.ensure_future(
        box.ask("POST", "/v1/chat/completions", {"model": "m@v1", "messages": [{"role": "user", "content": "hi"}]})
    )
    await box.until(lambda: box.state.holds.held("m@v1") == 1)
    del box.models["m@v1"]
    box.apply()
    assert (await call).error["code"] == "model_version_not_served"
