"""appliance/gateway/routing/router.py: placement as a pure function of table and outstanding work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.routing.router import AFFINITY_FACTOR, AFFINITY_SLACK_TOKENS, Choice, Router
from appliance.gateway.routing.table import Model, Replica


def _model(name: str = "m", **states: str) -> Model:
    replicas = tuple(Replica(key, f"/s/{key}", "v1", state) for key, state in states.items())
    return Model(name, "v1", "ready", "generate", 60.0, replicas)


def _router(*models: Model, max_inflight: int = 100) -> Router:
    router = Router(max_inflight=max_inflight)
    router.apply(models)
    return router


def test_draining_suspect_and_full_replicas_get_nothing() -> None:
    router = _router(_model(a="open", b="draining"), max_inflight=2)
    first = router.choose("m", 1, True, lambda: b"0", 0.0)
    second = router.choose("m", 1, False, lambda: b"0", 0.0)
    assert first is not None and second is not None and {first.replica.id, second.replica.id} == {"a"}
    assert router.choose("m", 1, False, lambda: b"0", 0.0) is None
    router.end(first)
    router.fail(second, 10.0)
    assert router.choose("m", 1, False, lambda: b"0", 10.1) is None
    assert router.choose("m", 1, False, lambda: b"0", 10.3) is not None


def test_a_replica_without_a_sign_of_life_takes_requests_only_where_it_is_the_last() -> None:
    silent, other = (Replica(key, f"/s/{key}", "v1", "open", key == "a") for key in "ab")
    router = _router(Model("m", "v1", "ready", "generate", 60.0, (silent, other)), max_inflight=3)
    chosen = [router.choose("m", 10_000 * n, True, lambda: b"0", 0.0) for n in range(1, 4)]
    assert [choice.replica.id for choice in chosen if choice] == ["b"] * 3, "however loaded the other is"
    last = router.choose("m", 1, True, lambda: b"0", 0.0)
    assert last is not None and last.replica.id == "a"


def test_unknown_model_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        _router().choose("m", 1, False, lambda: b"0", 0.0)


def test_failures_back_off_and_success_or_a_changed_row_forgives() -> None:
    router = _router(_model(a="open"))
    waits = []
    now = 0.0
    for _ in range(8):
        choice = router.choose("m", 1, False, lambda: b"0", now)
        assert choice is not None
        router.fail(choice, now)
        router.end(choice)
        waits.append(choice.load.suspect_until_s - now)
        now = choice.load.suspect_until_s
    assert waits == sorted(waits) and waits[0] == 0.25 and waits[-1] == 4.0
    router.apply([_model(a="open")])
    assert router.loads["a"].failures == 8, "the same row says nothing new about the replica"
    router.apply([_model(a="draining")])
    router.apply([_model(a="open")])
    assert router.loads["a"].failures == 0


def test_zero_of_a_draining_or_removed_replica_is_told() -> None:
    router = _router(_model(a="open"))
    one, two = (router.choose("m", 1, False, lambda: b"0", 0.0) for _ in range(2))
    assert one is not None and two is not None
    router.apply([_model(a="draining")])
    assert router.end(one) is False
    assert router.end(two) is True
    router.apply([_model(a="open")])
    three = router.choose("m", 1, False, lambda: b"0", 0.0)
    assert three is not None
    router.apply([])
    assert router.report() == {"a": {"inflight": 1, "streams": 0, "waiting_tokens": 1}}
    assert router.end(three) is True
    assert router.report() == {}


def test_replica_shared_by_models_counts_once_and_drains_only_when_all_rows_do() -> None:
    router = _router(_model("base", a="open"), _model("adapter", a="draining"))
    choice = router.choose("base", 10, True, b"0", 0.0)
    assert choice is not None and router.choose("adapter", 1, False, b"0", 0.0) is None
    assert router.report()["a"] == {"inflight": 1, "streams": 1, "waiting_tokens": 10}
    assert router.end(choice) is False


def test_affinity_yields_to_clear_imbalance() -> None:
    router = _router(_model(a="open", b="open"))
    home = router.choose("m", 100, False, lambda: b"42", 0.0, 100)
    assert home is not None
    same = router.choose("m", AFFINITY_SLACK_TOKENS, False, lambda: b"42", 0.0, AFFINITY_SLACK_TOKENS)
    assert same is not None and same.replica.id == home.replica.id
    away = router.choose("m", 100, False, lambda: b"42", 0.0, AFFINITY_SLACK_TOKENS)
    assert away is not None and away.replica.id != home.replica.id


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5000), st.booleans()), max_size=60))
def test_load_balances_and_returns_to_zero(requests: list[tuple[int, int, bool]]) -> None:
    router = _router(_model(a="open", b="open", c="open"))
    placed: list[Choice] = []
    for prefix, tokens, stream in requests:
        before = [load.weight for load in router.loads.values()]
        choice = router.choose("m", tokens, stream, lambda prefix=prefix: b"%d" % prefix, 0.0, tokens)
        assert choice is not None
        # Whoever was chosen stood within the bound of the least loaded before this request.
        assert choice.load.weight - tokens - tokens // 16 - 1 <= min(before) * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS
        placed.append(choice)
    for choice in placed:
        router.end(choice)
    assert all(row == {"inflight": 0, "streams": 0, "waiting_tokens": 0} for row in router.report().values())


def test_new_prompts_go_past_engines_that_compute_one_to_those_that_only_generate() -> None:
    router = _router(_model(a="open", b="open"))
    generates = router.choose("m", 30_000, True, lambda: b"0", 0.0, 1000)
    assert generates is not None
    router.started(generates)  # its first token came; 29,000 are to come
    other = next(text for text in (b"%d" % n for n in range(99)) if _home(text) != generates.replica.id)
    computes = router.choose("m", 20_100, True, lambda: other, 0.0, 20_000)
    assert computes is not None and computes.replica.id != generates.replica.id
    third = router.choose("m", 600, True, lambda: other, 0.0, 500)
    assert third is not None and third.replica.id == generates.replica.id
    for choice in (generates, computes, third):
        router.end(choice)
    assert all(load.weight == 0 for load in router.loads.values())


def _home(prefix: bytes) -> str:
    """Where this prefix is at home while nothing is loaded."""
    choice = _router(_model(a="open", b="open")).choose("m", 1, True, lambda: prefix, 0.0)
    assert choice is not None
    return choice.replica.id
