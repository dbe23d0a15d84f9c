"""Traffic that is made for the simulator, coarse clocks, and requests that move to an engine that opens."""

from __future__ import annotations

from array import array

import pytest

from benchmarks._traffic import KINDS, made
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.engine import EngineModel
from benchmarks.simulator.trace import Requests


@pytest.mark.parametrize("name", list(KINDS))
def test_a_seed_makes_the_same_trace_with_the_rate_and_sizes_that_were_asked(name: str) -> None:
    kind = KINDS[name]
    found, again, other = made(kind, 1), made(kind, 1), made(kind, 2)
    assert found == again and found != other
    assert list(found.arrival_s) == sorted(found.arrival_s) and found.arrival_s[0] == 0
    assert 0.4 * kind.per_s * kind.seconds < len(found) < 2.5 * kind.per_s * kind.seconds
    assert min(found.prompt) >= 1 and min(found.output) >= 1
    if kind.clock_s:
        assert all(at_s % kind.clock_s == pytest.approx(0) for at_s in found.arrival_s)


def waits_s(requests: Requests, opens_s: float, model: EngineModel | None = None) -> list[float]:
    """Times to first token with one engine from the start and a second from `opens_s` on."""
    cluster = Cluster(requests, model or EngineModel())
    cluster.start("a")
    cluster.open("a")
    cluster.advance(opens_s)
    cluster.start("b")
    cluster.open("b")
    cluster.advance(10_000.0)
    assert min(cluster.served.end_s) >= 0, "each was answered once"
    return [first - at for first, at in zip(cluster.served.first_token_s, requests.arrival_s, strict=True)]


def test_requests_that_wait_move_to_an_engine_that_opens() -> None:
    prompts = Requests(array("d", [0.0] * 40), array("l", [8000] * 40), array("l", [2] * 40))
    alone, helped = waits_s(prompts, 9_000.0), waits_s(prompts, 1.0)
    assert max(helped) < 0.6 * max(alone), "half of what is left after a second is served by the other"
