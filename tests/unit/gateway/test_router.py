"""appliance/gateway/core/router.py: placement as a pure function of table and outstanding work."""

from __future__ import annotations

import time
from asyncio import Future
from unittest.mock import Mock

import msgspec
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
from appliance.gateway.core.table import Model, Replica


def _model(name: str = "m", **states: str) -> Model:
    replicas = tuple(Replica(key, f"/s/{key}", "v1", state) for key, state in states.items())
    return Model(name, "v1", "generate", replicas)


def _router(*models: Model, max_inflight: int = 100) -> Router:
    router = Router(max_inflight=max_inflight)
    router.apply(models)
    return router


def test_draining_paused_and_full_replicas_get_nothing() -> None:
    router = _router(_model(a="open", b="draining"), max_inflight=2)
    first = router.choose(["m"], Work(), 0.0)
    second = router.choose(["m"], Work(), 0.0)
    assert first is not None and second is not None and {first.replica.id, second.replica.id} == {"a"}
    assert router.choose(["m"], Work(), 0.0) is None
    router.end(first)
    router.fail(second, 10.0)
    assert router.choose(["m"], Work(), 10.1) is None
    assert router.choose(["m"], Work(), 10.3) is not None


def test_a_replica_without_a_sign_of_life_takes_requests_only_where_it_is_the_last() -> None:
    silent, other = (Replica(key, f"/s/{key}", "v1", "open", key == "a") for key in "ab")
    router = _router(Model("m", "v1", "generate", (silent, other)), max_inflight=3)
    chosen = [router.choose(["m"], Work(tokens=10_000 * n), 0.0) for n in range(1, 4)]
    assert [choice.replica.id for choice in chosen if choice] == ["b"] * 3, "however loaded the other is"
    last = router.choose(["m"], Work(), 0.0)
    assert last is not None and last.replica.id == "a"


def test_replica_shared_by_models_counts_once_and_drains_only_when_all_rows_do() -> None:
    router = _router(_model("base", a="open"), _model("adapter", a="draining"))
    choice = router.choose(["base"], Work(tokens=10), 0.0)
    assert choice is not None and router.choose(["adapter"], Work(), 0.0) is None
    assert (router.loads["a"].inflight, router.loads["a"].tokens) == (1, 10)
    assert router.end(choice) is False


def test_choose_gives_batch_half_of_the_slots_that_people_leave() -> None:
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


def test_priority_puts_an_owner_behind_what_it_has_on_the_replica_and_batch_behind_all() -> None:
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
def test_load_balances_and_returns_to_zero(requests: list[tuple[int, int]]) -> None:
    router = _router(_model(a="open", b="open", c="open"))
    placed: list[Choice] = []
    for prefix, tokens in requests:
        before = [load.weight for load in router.loads.values()]
        choice = router.choose(["m"], Work("", tokens, tokens, beginning=prefix), 0.0)
        assert choice is not None
        # Whoever was chosen stood within the bound of the least loaded before this request.
        assert choice.load.weight - tokens - tokens // 16 - 1 <= min(before) * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS
        placed.append(choice)
    for choice in placed:
        router.end(choice)
    assert all(load == ReplicaLoad() for load in router.loads.values())


def ticket(model: str = "m", owner: str = "", tokens: int = 1) -> Ticket:
    return Ticket(model, ("m", False), (model,), Work(owner, tokens), (), Mock(spec=Future))


def placed(items: list[Ticket], slots: int) -> list[Ticket]:
    """The tickets that get a place on an engine with so many slots, in their order."""
    holds, router, order = Holds(len(items)), _router(_model(a="open"), max_inflight=slots), list[Ticket]()
    for item in items:
        item.place.set_result.side_effect = lambda _, item=item: order.append(item)  # type: ignore[attr-defined]
        assert holds.add(item)
    assert not items or not holds.add(ticket())
    holds.place(router, 0.0)
    assert sum(map(len, holds.queues.values())) == len(items) - len(order)
    return order


def test_place_passes_requests_whose_names_are_full() -> None:
    elsewhere, base = ticket("not in the table"), ticket()
    assert placed([elsewhere, base], 2) == [base]


def test_queue_removed_request_costs_its_owner_nothing() -> None:
    holds, items = Holds(9), [ticket(owner=owner, tokens=9) for owner in "aab"]
    for item in items:
        holds.add(item)
    assert holds.remove(items[0]) and not holds.remove(items[0]) and not holds.remove(ticket(owner="x"))
    assert [*holds.queues["m", False]] == items[1:]


def test_refuse_of_all_that_wait_takes_no_time() -> None:
    holds, items = Holds(4096), [ticket(owner=str(n % 9)) for n in range(4096)]
    for item in items:
        holds.add(item)
    began_s = time.process_time()
    for item in items:
        assert holds.remove(item)
    assert time.process_time() - began_s < 0.2, "4,096 requests, each looked for among all others, took 1.3 s"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=100))
def test_backlogged_owners_are_never_further_apart_than_two_items(items: list[tuple[str, int]]) -> None:
    left = [ticket(owner=owner, tokens=weight) for owner, weight in items]
    had = dict.fromkeys("abc", 0)
    for item in placed(left, 100):
        had[item.work.owner] += item.work.tokens
        left.remove(item)
        waiting = {item.work.owner for item in left}
        assert max((had[one] for one in waiting), default=0) - min((had[one] for one in waiting), default=0) <= 200
    assert not left
