"""A share of a model's requests goes to its canary; what fails there is the canary's, not the client's."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from appliance.gateway.core.router import Router
from appliance.gateway.core.table import Canary, Model
from appliance.gateway.main import load_report

from .conftest import Box, Start
from .upstreams import Reply, UpstreamRequest, chat_answer, dies


async def split(box: Box, share: float, **canary_states: str) -> None:
    """ "m" v1 on e0, and its canary v2 on e1."""
    for name in ("e0", "e1"):
        if name not in box.engines:
            await box.engine(name)
    box.serve("m", "e0")
    box.serve("m@v2", **(canary_states or {"e1": "open"}))
    for replica in box.models["m@v2"]["replicas"]:
        replica["version"] = "v2"
    box.models["m"]["canary"] = {"name": "m@v2", "version": "v2", "share": share, "since_s": 5.0}
    box.apply()


def asked(i: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"conversation {i}"}]}


def counted(box: Box) -> dict[str, tuple[int, int]]:
    """Requests and errors of each version."""
    versions = load_report(box.state)["canaries"]["m"]["versions"]
    return {name: (row["requests"], row["errors"]) for name, row in versions.items()}


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
    assert counts["since_s"] == 5.0 and counted(box) == {
        "v1": (2 * versions.count("v1"), 0),
        "v2": (2 * versions.count("v2"), 0),
    }
    times = counts["versions"]["v2"]
    assert sum(times["first_byte"].values()) == sum(times["duration"].values()) == 2 * versions.count("v2")


async def test_what_dies_on_the_canary_is_answered_by_the_other_version_and_counts_for_the_canary(
    start_box: Start,
) -> None:
    box = await start_box()
    await split(box, 1.0)
    box.engines["e1"].script = dies
    response = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert (response.status, response.headers["x-appliance-model-version"]) == (200, "v1")
    assert counted(box) == {"v2": (1, 1), "v1": (1, 0)}


async def test_answers_of_400_and_500_are_errors_of_the_version_that_gave_them(start_box: Start) -> None:
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
    assert counted(box) == {"v2": (3, 2)}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_canary_for_meets_the_share_over_conversations_and_over_keys(share: float) -> None:
    router = Router(max_inflight=10)
    canary = Canary("m@v2", share, 1.0)
    router.apply([Model("m", "v1", "generate", canary=canary), Model("m@v2", "v2", "generate")])
    asked = [("key_1", crc32(b"You are helpful.\nquestion %d" % i)) for i in range(20_000)]
    for callers in (asked, [(f"key_{i}", asked[0][1]) for i in range(20_000)]):
        found = sum(router.canary_for("m", *caller) is not None for caller in callers)
        assert found / len(callers) == pytest.approx(share, rel=0.25)


async def test_a_version_by_its_name(box: Box) -> None:
    box.models["m@v1"] = {**box.models["m"], "pins": "m"}
    box.models["m"]["canary"] = None
    box.apply()
    ask = {"model": "m@v1", "messages": [{"role": "user", "content": "hi"}]}
    answer = await box.ask("POST", "/v1/chat/completions", ask)
    assert (answer.status, answer.headers["x-appliance-model-version"]) == (200, "v1")
    assert box.engines["e0"].requests[0].json["model"] == "m", "as its engine knows it"
    assert box.state.spending.take_sums()[0]["model"] == "m"
    missing = await box.ask("POST", "/v1/chat/completions", ask | {"model": "m@v9"})
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_version_not_served", "model")
    unknown = await box.ask("POST", "/v1/chat/completions", ask | {"model": "x@v9"})
    assert unknown.error["code"] == "model_not_found"
