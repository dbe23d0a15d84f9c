from __future__ import annotations

from array import array

from benchmarks.simulator.simulate import Setup, run_policy
from benchmarks.simulator.trace import Requests
from scheduler.core.workload import Policy


def burst(at_s: float = 600.0, requests: int = 600, horizon_s: float = 1800.0) -> Requests:
    """A trickle with one burst that a single engine cannot take."""
    arrivals = sorted([*(float(n) for n in range(int(horizon_s))), *(at_s + n / 20 for n in range(requests))])
    return Requests(array("d", arrivals), array("l", [2000] * len(arrivals)), array("l", [200] * len(arrivals)))


# --- engines


# --- whole runs


def test_auto_trains_as_much_as_the_splits_that_serve_as_well() -> None:
    """Within what learning costs in a quarter of an hour; what comes after is held to 1 % (tests/property)."""
    setup = Setup(burst(300, 600, 900))
    figures = run_policy(setup, Policy("auto"))
    assert figures.requests_served == len(setup.requests)
    splits = [run_policy(setup, Policy("split", training)) for training in range(9)]
    as_good = [one for one in splits if one.slo_attainment >= figures.slo_attainment]
    assert as_good and all(0.98 * one.training_gpu_hours < figures.training_gpu_hours for one in as_good)


def test_a_request_is_heard_of_though_the_standby_for_it_is_forgotten_by_the_clock() -> None:
    arrivals = [60.0 * n + m / 80 for n in range(15) for m in range(40)]
    arrivals += [arrivals[-1] + pause_s for pause_s in (407.0, 1013.0)]
    count = len(arrivals)
    figures = run_policy(
        Setup(Requests(array("d", arrivals), array("l", [4000] * count), array("l", [20] * count))), Policy("auto")
    )
    assert figures.within[-2:] == b"\1\1"
