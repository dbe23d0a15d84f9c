"""appliance/gateway/routing/holds.py: who may wait, and who is next."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.gateway.routing.holds import Bounds, Holds, Refusal, Ticket

BOUNDS = Bounds(requests=6, requests_per_model=4, body_bytes=100)


def test_first_in_first_out_by_model_and_removal_is_idempotent() -> None:
    holds: Holds[str] = Holds(BOUNDS)
    tickets = [holds.add("m", str(i), 1, 10.0, 0.0) for i in range(3)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    assert holds.first("m") is tickets[0]
    assert holds.remove(tickets[0]) and not holds.remove(tickets[0])
    assert holds.first("m") is tickets[1] and holds.first("other") is None
    assert holds.models() == ["m"] and holds.held("m") == 2


def test_owners_take_turns_and_each_ones_longest_waiting_is_next() -> None:
    holds: Holds[str] = Holds(Bounds(requests=20, requests_per_model=20, body_bytes=100))
    for item in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
        assert isinstance(holds.add("m", item, 1, 10.0, 0.0, owner=item[0]), Ticket)
    assert holds.held("m") == 7 and len(list(holds)) == 7
    taken = []
    while (ticket := holds.first("m")) is not None:
        assert holds.first("m") is ticket, "it stays first until it is removed"
        assert holds.remove(ticket)
        taken.append(ticket.item)
    assert taken == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert holds.count == holds.held("m") == 0 and holds.models() == []


def test_who_gives_up_further_back_costs_his_owner_no_turn() -> None:
    holds: Holds[str] = Holds(BOUNDS)
    first, second, other = (holds.add("m", item, 1, 10.0, 0.0, owner=item[0]) for item in ("a1", "a2", "b1"))
    assert isinstance(second, Ticket) and holds.remove(second) and holds.first("m") is first
    assert isinstance(first, Ticket) and holds.remove(first) and holds.first("m") is other


def test_every_bound_has_its_own_refusal() -> None:
    holds: Holds[int] = Holds(BOUNDS)
    assert holds.add("m", 0, 1, 5.0, 5.0) is Refusal.DEADLINE
    assert holds.add("m", 0, 101, 5.0, 0.0) is Refusal.BYTES
    for i in range(4):
        assert isinstance(holds.add("m", i, 1, 5.0, 0.0), Ticket)
    assert holds.add("m", 4, 1, 5.0, 0.0) is Refusal.MODEL_REQUESTS
    for i in range(2):
        assert isinstance(holds.add("n", i, 1, 5.0, 0.0), Ticket)
    assert holds.add("o", 0, 1, 5.0, 0.0) is Refusal.REQUESTS


class HoldsMachine(RuleBasedStateMachine):
    """Counts always equal what is queued, and no bound is ever exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: Holds[int] = Holds(BOUNDS)
        self.model: dict[int, Ticket[int]] = {}
        self.now = 0.0
        self.next = 0

    @rule(name=st.sampled_from("abc"), size=st.integers(0, 60), wait=st.integers(-1, 5))
    def add(self, name: str, size: int, wait: int) -> None:
        result = self.holds.add(name, self.next, size, self.now + wait, self.now)
        if isinstance(result, Ticket):
            self.model[self.next] = result
        self.next += 1

    @rule(index=st.integers(0, 10))
    def remove(self, index: int) -> None:
        if self.model:
            key = list(self.model)[index % len(self.model)]
            assert self.holds.remove(self.model.pop(key))

    @invariant()
    def agrees(self) -> None:
        assert self.holds.count == len(self.model) <= BOUNDS.requests
        assert self.holds.body_bytes == sum(t.body_bytes for t in self.model.values()) <= BOUNDS.body_bytes
        for name in "abc":
            mine = [key for key, ticket in self.model.items() if ticket.model == name]
            assert self.holds.held(name) == len(mine) <= BOUNDS.requests_per_model
            first = self.holds.first(name)
            assert (first.item if first else None) == (min(mine) if mine else None)


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
