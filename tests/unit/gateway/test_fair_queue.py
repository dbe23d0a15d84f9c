"""appliance/gateway/core/fair_queue.py: the order of several owners' items."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.core.fair_queue import FairQueue

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
