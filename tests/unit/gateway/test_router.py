"""appliance/gateway/core/router.py: placement as a pure function of table and outstanding work."""

from __future__ import annotations

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
    FairQueue,
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


def test_new_prompts_go_past_engines_that_compute_one_to_those_that_only_generate() -> None:
    router = _router(_model(a="open", b="open"))
    generates = router.choose(["m"], Work("", 30_000, 1000), 0.0)
    assert generates is not None
    router.started(generates)  # its first token came; 29,000 are to come
    other = next(n for n in range(99) if _home(n) != generates.replica.id)
    computes = router.choose(["m"], Work("", 20_100, 20_000, beginning=other), 0.0)
    assert computes is not None and computes.replica.id != generates.replica.id
    third = router.choose(["m"], Work("", 600, 500, beginning=other), 0.0)
    assert third is not None and third.replica.id == generates.replica.id
    for choice in (generates, computes, third):
        router.end(choice)
    assert all(load.weight == 0 for load in router.loads.values())


def _home(beginning: int) -> str:
    """Where this beginning is at home while nothing is loaded."""
    choice = _router(_model(a="open", b="open")).choose(["m"], Work(beginning=beginning), 0.0)
    assert choice is not None
    return choice.replica.id


MOST = 6


def ticket(model: str = "m", host: str = "", owner: str = "") -> Ticket:
    return Ticket(model, (host or model, False), (model,), Work(owner), (), Mock(spec=Future))


def test_next_passes_requests_whose_rows_are_full() -> None:
    holds: Holds = Holds(MOST)
    adapter, base = ticket("adapter", "m"), ticket("m", "m")
    assert holds.add(adapter) and holds.add(base)
    assert holds.next(("m", False), {("adapter",)}) is base
    assert holds.next(("m", False), {("adapter",), ("m",)}) is None and holds.next(("other", False)) is None
    assert holds.remove(adapter) and not holds.remove(adapter)


Item = tuple[str, int]


def _queue(*owners: str, weight: int = 1) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for number, owner in enumerate(owners):
        queue.add(owner, (owner, number), weight)
    return queue


def _taken(queue: FairQueue[Item], most: int = 1000) -> list[Item]:
    taken = []
    while len(taken) < most and (item := next(iter(queue), None)) is not None:
        queue.take(item[0], item)
        taken.append(item)
    return taken


def test_discarded_items_cost_their_owner_nothing() -> None:
    queue = _queue(*"aab")
    assert queue.discard("a", ("a", 0)) and not queue.discard("a", ("a", 0)) and not queue.discard("x", ("x", 0))
    assert _taken(queue) == [("a", 1), ("b", 2)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=100))
def test_backlogged_owners_are_never_further_apart_than_two_items(items: list[tuple[str, int]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    weights = {}
    for number, (owner, weight) in enumerate(items):
        queue.add(owner, (owner, number), weight)
        weights[owner, number] = weight
    had, left = dict.fromkeys("abc", 0), list(weights)
    for item in _taken(queue):
        had[item[0]] += weights[item]
        left.remove(item)
        waiting = {owner for owner, _ in left}
        assert max((had[one] for one in waiting), default=0) - min((had[one] for one in waiting), default=0) <= 200
    assert not left and not len(queue)
