"""appliance/gateway/routing/holds.py: who may wait, and who is next."""

from __future__ import annotations

from asyncio import Future
from unittest.mock import Mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.gateway.core.config import HoldLimits
from appliance.gateway.routing.holds import Holds, Refusal, Ticket
from appliance.gateway.routing.router import Choice, Work

BOUNDS = HoldLimits(requests=6, requests_per_model=4, body_bytes=100)


PLACE = Mock(spec=Choice)


def ticket(model: str = "m", host: str = "", owner: str = "", size: int = 1) -> Ticket:
    return Ticket(model, host or model, (model,), Work(owner), size, (), Mock(spec=Future))


def test_owners_alternate_over_all_names_of_the_same_engines() -> None:
    holds: Holds = Holds(HoldLimits(requests=20, requests_per_model=20, body_bytes=100))
    for owner, model in (("a", "x"), ("a", "y"), ("a", "m"), ("b", "x")):
        assert holds.add(ticket(model, "m", owner)) is None
    assert (holds.held("x"), holds.models(), holds.hosts()) == (2, ["x", "y", "m"], ["m"])
    taken = []
    while (first := holds.next("m")) is not None:
        assert holds.next("m") is first, "it stays first until it is removed"
        holds.take(first, PLACE)
        first.place.set_result.assert_called_once_with(PLACE)
        taken.append(first.work.owner + first.model)
    assert taken == ["ax", "bx", "ay", "am"]
    assert holds.count == holds.held("x") == 0 and holds.models() == holds.hosts() == []


def test_next_passes_requests_whose_rows_are_full() -> None:
    holds: Holds = Holds(BOUNDS)
    adapter, base = ticket("adapter", "m"), ticket("m", "m")
    assert holds.add(adapter) is None and holds.add(base) is None
    assert holds.next("m", {("adapter",)}) is base
    assert holds.next("m", {("adapter",), ("m",)}) is None and holds.next("other") is None
    assert holds.remove(adapter) and not holds.remove(adapter)


def test_every_bound_has_its_own_refusal() -> None:
    holds: Holds = Holds(BOUNDS)
    assert holds.add(ticket(size=101)) is Refusal.BYTES
    for _ in range(4):
        assert holds.add(ticket()) is None
    assert holds.add(ticket()) is Refusal.MODEL_REQUESTS
    for _ in range(2):
        assert holds.add(ticket(model="n")) is None
    assert holds.add(ticket(model="o")) is Refusal.REQUESTS


class HoldsMachine(RuleBasedStateMachine):
    """Counts always equal what is queued, and no bound is ever exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: Holds = Holds(BOUNDS)
        self.tickets: list[Ticket] = []

    @rule(name=st.sampled_from("abc"), host=st.sampled_from("ab"), owner=st.sampled_from("xy"), size=st.integers(0, 60))
    def add(self, name: str, host: str, owner: str, size: int) -> None:
        new = ticket(name, host, owner, size)
        if self.holds.add(new) is None:
            self.tickets.append(new)

    @rule(index=st.integers(0, 10))
    def remove(self, index: int) -> None:
        if self.tickets:
            assert self.holds.remove(self.tickets.pop(index % len(self.tickets)))

    @rule(host=st.sampled_from("ab"))
    def take(self, host: str) -> None:
        first = self.holds.next(host)
        assert (first is None) == (not any(one.host == host for one in self.tickets))
        if first is not None:
            self.holds.take(first, PLACE)
            self.tickets.remove(first)

    @invariant()
    def agrees(self) -> None:
        assert self.holds.count == len(self.tickets) <= BOUNDS.requests
        assert self.holds.body_bytes == sum(one.body_bytes for one in self.tickets) <= BOUNDS.body_bytes
        assert set(self.holds) == set(self.tickets)
        for name in "abc":
            assert self.holds.held(name) == sum(one.model == name for one in self.tickets) <= BOUNDS.requests_per_model


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
