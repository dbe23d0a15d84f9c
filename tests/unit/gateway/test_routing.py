"""The router chooses replicas by table and open work, the queue is fair to owners, and canaries get their share."""

import time
from asyncio import Future
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.core.router import (
    AFFINITY_FACTOR,
    AFFINITY_SLACK_TOKENS,
    BATCH_BEHIND,
    Choice,
    Holds,
    ReplicaLoad,
    Router,
    Ticket,
    Work,
)
from appliance.gateway.core.table import Canary, Model, Replica
from appliance.gateway.main import load_report

from .conftest import Box, Start
from .upstreams import chat_answer, dies, gives


def _model(name: str = "m", **states: str) -> Model:
    replicas = tuple(Replica(key, f"/s/{key}", "v1", state) for key, state in states.items())
    return Model(name, "v1", "generate", replicas)


def _router(*models: Model, max_inflight: int = 100) -> Router:
    router = Router(max_inflight=max_inflight)
    router.apply(models)
    return router


def test_choose_skips_draining_paused_and_full_replicas() -> None:
    router = _router(_model(a="open", b="draining"), max_inflight=2)
    first = router.choose(["m"], Work(), 0.0)
    second = router.choose(["m"], Work(), 0.0)
    assert first is not None and second is not None and {first.replica.id, second.replica.id} == {"a"}
    assert router.choose(["m"], Work(), 0.0) is None
    router.end(first)
    router.fail(second, 10.0)
    assert router.choose(["m"], Work(), 10.1) is None
    assert router.choose(["m"], Work(), 10.3) is not None


def test_choose_uses_silent_replica_only_as_last_resort() -> None:
    silent, other = (Replica(key, f"/s/{key}", "v1", "open", key == "a") for key in "ab")
    router = _router(Model("m", "v1", "generate", (silent, other)), max_inflight=3)
    chosen = [router.choose(["m"], Work(tokens=10_000 * n), 0.0) for n in range(1, 4)]
    assert [choice.replica.id for choice in chosen if choice] == ["b"] * 3, "however loaded the other is"
    last = router.choose(["m"], Work(), 0.0)
    assert last is not None and last.replica.id == "a"


def test_replica_draining_for_one_model_is_chosen_for_another() -> None:
    router = _router(_model("base", a="open"), _model("adapter", a="draining"))
    choice = router.choose(["base"], Work(tokens=10), 0.0)
    assert choice is not None and router.choose(["adapter"], Work(), 0.0) is None
    assert (router.loads["a"].inflight, router.loads["a"].tokens) == (1, 10)
    assert router.end(choice) is False


def test_choose_limits_batch_to_half_of_free_slots() -> None:
    router = _router(msgspec.structs.replace(_model(a="open"), slots=8))
    batch = [router.choose(["m"], Work(batch=True), 0.0) for _ in range(5)]
    assert batch[4] is None and all(batch[:4])
    people = [router.choose(["m"], Work(), 0.0) for _ in range(7)]
    assert people[6] is None and all(people[:6]), "ten sequences together"
    assert batch[0] is not None and people[0] is not None
    router.end(batch[0])
    assert router.choose(["m"], Work(batch=True), 0.0) is None, "none beyond the slots"
    router.end(people[0])
    assert router.choose(["m"], Work(batch=True), 0.0) is None


def test_priority_puts_owners_with_less_load_first_and_batch_last() -> None:
    router = _router(_model(a="open"))

    def priority(work: Work, now_s: float) -> int:
        choice = router.choose(["m"], work, now_s)
        assert choice is not None
        return choice.priority

    many = [priority(Work("ann", tokens=1000), 10.0) for _ in range(3)]
    assert many == [10_000, 11_000, 12_000]
    assert many[0] < priority(Work("ben"), 10.5) < many[1]
    assert priority(Work("ben"), 60.0) > many[2], "nobody waits for ever"
    assert priority(Work("eve", batch=True), 0.0) == BATCH_BEHIND < 1 << 63


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5000)), max_size=60))
def test_router_balances_load_and_returns_to_zero(requests: list[tuple[int, int]]) -> None:
    router = _router(_model(a="open", b="open", c="open"))
    placed: list[Choice] = []
    for prefix, tokens in requests:
        before = [load.weight for load in router.loads.values()]
        choice = router.choose(["m"], Work("", tokens, tokens, beginning=prefix), 0.0)
        assert choice is not None
        # Before this request, the load of the chosen replica was at most the least load times a factor plus a slack.
        assert choice.load.weight - tokens - tokens // 16 - 1 <= min(before) * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS
        placed.append(choice)
    for choice in placed:
        router.end(choice)
    assert all(load == ReplicaLoad() for load in router.loads.values())


def ticket(model: str = "m", owner: str = "", tokens: int = 1) -> Ticket:
    return Ticket(model, ("m", False), (model,), Work(owner, tokens), (), Mock(spec=Future))


def placed(items: list[Ticket], slots: int) -> list[Ticket]:
    """Return the tickets in the order in which they get a slot of an engine that has `slots` slots."""
    holds, router, order = Holds(len(items)), _router(_model(a="open"), max_inflight=slots), list[Ticket]()
    for item in items:
        item.place.set_result.side_effect = lambda _, item=item: order.append(item)  # type: ignore[attr-defined]
        assert holds.add(item)
    assert not items or not holds.add(ticket())
    for router.max_inflight in (*range(min(slots, 20)), slots):
        holds.place(router, 0.0)
    assert sum(map(len, holds.queues.values())) == len(items) - len(order)
    return order


def test_place_skips_requests_for_full_models() -> None:
    elsewhere, base = ticket("not in the table"), ticket()
    assert placed([elsewhere, base], 2) == [base]


def test_queue_does_not_charge_owner_for_removed_request() -> None:
    holds, items = Holds(9), [ticket(owner=owner, tokens=9) for owner in "aab"]
    for item in items:
        holds.add(item)
    assert holds.remove(items[0]) and not holds.remove(items[0]) and not holds.remove(ticket(owner="x"))
    assert [*holds.queues["m", False]] == items[1:]


def test_queue_removes_4096_requests_quickly() -> None:
    holds, items = Holds(4096), [ticket(owner=str(n % 9)) for n in range(4096)]
    for item in items:
        holds.add(item)
    began_s = time.process_time()
    for item in items:
        assert holds.remove(item)
    assert time.process_time() - began_s < 0.2, "4,096 requests, each looked for among all others, took 1.3 s"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=100))
def test_queue_keeps_backlogged_owners_within_two_items(items: list[tuple[str, int]]) -> None:
    left = [ticket(owner=owner, tokens=weight) for owner, weight in items]
    had = dict.fromkeys("abc", 0)
    for item in placed(left, 100):
        had[item.work.owner] += item.work.tokens
        left.remove(item)
        waiting = {item.work.owner for item in left}
        assert max((had[one] for one in waiting), default=0) - min((had[one] for one in waiting), default=0) <= 200
    assert not left


async def split(box: Box, share: float) -> None:
    """Serve v1 of "m" on e0 and its canary v2 on e1; the canary gets this share of requests."""
    for name in ("e0", "e1"):
        if name not in box.engines:
            await box.engine(name)
    box.serve("m", "e0")
    box.serve("m@v2", "e1")
    for replica in box.models["m@v2"]["replicas"]:
        replica["version"] = "v2"
    box.models["m"]["canary"] = {"name": "m@v2", "version": "v2", "share": share, "since_s": 5.0}
    box.apply()


def asked(i: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"conversation {i}"}]}


def counted(box: Box) -> dict[str, tuple[int, int]]:
    """Return version -> (requests, errors) of model "m" from the load report."""
    versions = load_report(box.state)["canaries"]["m"]["versions"]
    return {name: (row["requests"], row["errors"]) for name, row in versions.items()}


async def test_canary_keeps_version_within_a_conversation(start_box: Start) -> None:
    box = await start_box()
    await split(box, 0.3)
    versions = []
    for i in range(40):
        first, turn = asked(i), asked(i)
        turn["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and then?"}]
        answers = [await box.ask("POST", "/v1/chat/completions", body) for body in (first, turn)]
        (version,) = {answer.headers["x-appliance-model-version"] for answer in answers}
        versions.append(version)
    old, new = 2 * versions.count("v1"), 2 * versions.count("v2")
    assert 8 <= new <= 44
    assert {request.json["model"] for request in box.engines["e1"].requests} == {"m@v2"}, "as its engine knows it"
    assert {request.json["model"] for request in box.engines["e0"].requests} == {"m"}
    counts = load_report(box.state)["canaries"]["m"]
    assert counts["since_s"] == 5.0 and counted(box) == {"v1": (old, 0), "v2": (new, 0)}
    times = counts["versions"]["v2"]
    assert sum(times["first_byte"].values()) == sum(times["duration"].values()) == new


async def test_canary_engine_death_is_retried_and_counted(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0)
    box.engines["e1"].script = dies
    response = await box.ask("POST", "/v1/chat/completions", asked(1))
    assert (response.status, response.headers["x-appliance-model-version"]) == (200, "v1")
    assert counted(box) == {"v2": (1, 1), "v1": (1, 0)}


async def test_canary_counts_400_and_500_as_errors(start_box: Start) -> None:
    box = await start_box()
    await split(box, 1.0)
    for status in (200, 400, 500):
        error = {"error": {"message": "no", "type": "x", "code": status}}
        box.engines["e1"].script = gives(error if status > 200 else chat_answer(), status)
        assert (await box.ask("POST", "/v1/chat/completions", asked(1))).status == status
    assert counted(box) == {"v2": (3, 2)}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_canary_for_gives_share_of_conversations_and_of_keys(share: float) -> None:
    router = Router(max_inflight=10)
    canary = Canary("m@v2", share, 1.0)
    model = Model("m", "v1", "generate", canary=canary)
    router.apply([model, Model("m@v2", "v2", "generate")])
    asked = [("key_1", crc32(b"You are helpful.\nquestion %d" % i)) for i in range(20_000)]
    for callers in (asked, [(f"key_{i}", asked[0][1]) for i in range(20_000)]):
        found = sum(router.canary_for(model, *caller) == ("m@v2",) for caller in callers)
        assert found / len(callers) == pytest.approx(share, rel=0.25)


async def test_request_by_version_name_reaches_that_version(box: Box) -> None:
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
