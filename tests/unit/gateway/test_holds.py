"""Holds: who may wait, and who is next."""

from __future__ import annotations

from asyncio import Future
from unittest.mock import Mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.gateway.core.router import Choice, Holds, Ticket, Work

MOST = 6


PLACE = Mock(spec=Choice)


def ticket(model: str = "m", host: str = "", owner: str = "") -> Ticket:
    return Ticket(model, host or model, (model,), Work(owner), (), Mock(spec=Future))


def test_next_passes_requests_whose_rows_are_full() -> None:
    holds: Holds = Holds(MOST)
    adapter, base = ticket("adapter", "m"), ticket("m", "m")
    assert holds.add(adapter) and holds.add(base)
    assert holds.next("m", {("adapter",)}) is base
    assert holds.next("m", {("adapter",), ("m",)}) is None and holds.next("other") is None
    assert holds.remove(adapter) and not holds.remove(adapter)


class HoldsMachine(RuleBasedStateMachine):
    """Counts always equal what is queued, and no bound is ever exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: Holds = Holds(MOST)
        self.tickets: list[Ticket] = []

    @rule(name=st.sampled_from("abc"), host=st.sampled_from("ab"), owner=st.sampled_from("xy"))
    def add(self, name: str, host: str, owner: str) -> None:
        new = ticket(name, host, owner)
        if self.holds.add(new):
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
        assert self.holds.count == len(self.tickets) <= MOST
        assert self.holds.count == len(self.tickets)
        for name in "abc":
            assert self.holds.held(name) == sum(one.model == name for one in self.tickets)


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
