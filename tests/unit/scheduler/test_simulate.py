from __future__ import annotations

from array import array

import pytest

from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.engine import EngineModel
from benchmarks.simulator.simulate import Setup, run_policy
from benchmarks.simulator.trace import Requests
from scheduler.core.workload import Policy


def burst(at_s: float = 600.0, requests: int = 600, horizon_s: float = 1800.0) -> Requests:
    """A trickle with one burst that a single engine cannot take."""
    arrivals = sorted([*(float(n) for n in range(int(horizon_s))), *(at_s + n / 20 for n in range(requests))])
    return Requests(array("d", arrivals), array("l", [2000] * len(arrivals)), array("l", [200] * len(arrivals)))


# --- engines


def test_one_request_alone_takes_its_steps() -> None:
    model = EngineModel()
    cluster = Cluster(Requests(array("d", [0.0]), array("l", [1000]), array("l", [11])), model)
    cluster.start("r")
    cluster.open("r")
    cluster.advance(100.0)
    first_s, end_s = cluster.served.first_token_s[0], cluster.served.end_s[0]
    assert first_s == pytest.approx(model.step_s(0, 0, 1000), rel=1e-6)
    assert end_s - first_s == pytest.approx(10 * model.step_s(1, 1001, 0), rel=0.01)


# --- whole runs


def test_auto_trains_as_much_as_the_splits_that_serve_as_well() -> None:
    """Within what learning costs in a quarter of an hour; what comes after is held to 1 % (tests/property)."""
    setup = Setup(burst(300, 600, 900))
    figures = run_policy(setup, Policy("auto"))
    assert figures.requests_served == len(setup.requests)
    splits = [run_policy(setup, Policy("split", training)) for training in range(9)]
    as_good = [one for one in splits if one.slo_attainment >= figures.slo_attainment]
    assert as_good and all(0.98 * one.training_gpu_hours < figures.training_gpu_hours for one in as_good)


def test_rare_requests_are_answered_in_time_and_training_has_every_device_between() -> None:
    arrivals = array("d", (n * 700.0 + n % 3 for n in range(8)))
    requests = Requests(arrivals, array("l", [1000] * 8), array("l", [200] * 8))
    setup = Setup(requests)
    figures = run_policy(setup, Policy("auto"))
    assert figures.slo_attainment == 1.0, "in time though no engine was awake"
    assert figures.training_gpu_hours > 0.92 * 8 * requests.horizon_s / 3600, "seven of eight devices would be 0.88"


def test_a_request_is_heard_of_though_the_standby_for_it_is_forgotten_by_the_clock() -> None:
    arrivals = [60.0 * n + m / 80 for n in range(15) for m in range(40)]
    arrivals += [arrivals[-1] + pause_s for pause_s in (407.0, 1013.0)]
    count = len(arrivals)
    figures = run_policy(
        Setup(Requests(array("d", arrivals), array("l", [4000] * count), array("l", [20] * count))), Policy("auto")
    )
    assert figures.within[-2:] == b"\1\1"
