"""The simulator generates reproducible traffic and moves waiting requests to new engines."""

from array import array
from dataclasses import replace

import pytest

from benchmarks._traffic import KINDS, trace_of
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.engine import EngineModel
from benchmarks.simulator.trace import Requests


@pytest.mark.parametrize("name", list(KINDS))
def test_traffic_has_its_rate_and_repeats_for_equal_seed(name: str) -> None:
    kind = replace(KINDS[name], seconds=1200.0)
    found, again, other = trace_of(kind, 1), trace_of(kind, 1), trace_of(kind, 2)
    assert found == again and found != other
    assert list(found.arrival_s) == sorted(found.arrival_s) and found.arrival_s[0] == 0
    assert 0.3 * kind.per_s * kind.seconds < len(found) < 3 * kind.per_s * kind.seconds
    assert min(found.prompt) >= 1 and min(found.output) >= 1
    if kind.clock_s:
        assert all(at_s % kind.clock_s == pytest.approx(0) for at_s in found.arrival_s)


def longest_wait_s(requests: Requests, opens_s: float) -> float:
    """Return the longest time to first token, in seconds, if a second engine opens at `opens_s`."""
    cluster = Cluster(requests, EngineModel())
    for name, at_s in (("a", 0.0), ("b", opens_s)):
        cluster.advance(at_s)
        cluster.start(name)
        cluster.open(name)
    cluster.advance(10_000.0)
    assert min(cluster.served.end_s) >= 0, "each was answered once"
    return max(first - at for first, at in zip(cluster.served.first_token_s, requests.arrival_s, strict=True))


def test_waiting_requests_move_to_newly_opened_engine() -> None:
    prompts = Requests(array("d", [0.0] * 40), array("l", [8000] * 40), array("l", [2] * 40))
    assert longest_wait_s(prompts, 1.0) < 0.6 * longest_wait_s(prompts, 9_000.0)
