"""Which owner's request an engine takes next."""

from __future__ import annotations

from serve.api.turns import Turns


def served(turns: Turns, *asked: tuple[str, int]) -> list[str]:
    """All enter at once; then one after the other is served, smallest place first, the earlier of equal ones."""
    waiting = [(turns.enter(owner, tokens), number, owner) for number, (owner, tokens) in enumerate(asked)]
    order = []
    for place, _, owner in sorted(waiting):
        turns.served(place)
        turns.took(owner, 0)
        order.append(owner)
    return order


def test_owners_take_turns_however_much_one_of_them_asks() -> None:
    assert served(Turns(), ("a", 9), ("a", 9), ("a", 9), ("b", 9), ("b", 9)) == ["a", "b", "a", "b", "a"]


def test_who_asks_little_has_more_turns_than_who_asks_much() -> None:
    order = served(Turns(), *[("long", 100)] * 3, *[("short", 10)] * 10)
    assert order[:3] == ["long", "short", "short"] and order.count("short") == 10
    assert order.index("long", 1) >= 10


def test_who_was_away_has_saved_nothing() -> None:
    turns = Turns()
    for _ in range(50):
        served(turns, ("a", 100))
    late = [turns.enter("b", 100) for _ in range(3)]
    assert late[0] < turns.enter("a", 100) < late[2]


def test_who_is_alone_keeps_no_debts_of_what_was_not_served() -> None:
    turns = Turns()
    places = [turns.enter("a", 1000) for _ in range(9)]
    turns.served(places[0])
    for _ in places[1:]:
        turns.took("a", -1000)
    turns.took("a", 0)
    assert turns.enter("a", 1000) <= 1000 and turns.enter("b", 1000) == 0


def test_what_was_written_counts_for_the_next_one() -> None:
    turns = Turns()
    turns.served(turns.enter("a", 10))
    turns.took("a", 500)
    assert turns.enter("a", 10) == 510 and turns.enter("b", 10) == 0


def test_owners_who_are_served_are_forgotten() -> None:
    turns = Turns()
    for number in range(1000):
        turns.served(turns.enter(f"owner {number}", 1))
        turns.took(f"owner {number}", 0)
        turns.served(turns.enter("a", 5))
    assert len(turns._ends) < 10
