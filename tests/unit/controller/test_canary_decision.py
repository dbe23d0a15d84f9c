"""What decides over a canary: errors at once, times and numbers of requests once it was watched long enough."""

from __future__ import annotations

import pytest

from appliance.controller.bus.load import VersionLoad
from appliance.controller.models.canaries import chance_of_errors, decide
from appliance.gateway.core.table import bucket
from appliance.store.rows import CanaryRow

ROW = CanaryRow("m", "v2", "v1", 0.1, created_s=0.0, watch_s=600.0, min_requests=50)
OVER_S = 601.0


def load(requests: int, errors: int = 0, *, first_s: float = 0.1, whole_s: float = 1.0) -> VersionLoad:
    good = requests - errors
    return VersionLoad(requests, errors, {bucket(first_s): good}, {bucket(whole_s): good})


def verdict(new: VersionLoad, old: VersionLoad, now_s: float = OVER_S) -> str:
    return decide(ROW, new, old, now_s).verdict


def test_canary_as_good_is_promoted_once_time_and_requests_suffice():
    assert verdict(load(60), load(540)) == "promote"
    assert verdict(load(60), load(540), now_s=599.0) == "wait"
    assert verdict(load(49), load(540)) == verdict(load(60), load(49)) == "wait"


def test_canary_with_errors_beyond_chance_is_rolled_back_at_once():
    assert verdict(load(20, 15), load(180), now_s=1.0) == "roll back"
    assert verdict(load(20, 1), load(180), now_s=1.0) == "wait"
    assert verdict(load(60, 30), load(540, 270)) == "promote", "both fail as often"
    assert verdict(load(60, 1), load(540, 9)) == "promote"
    assert verdict(load(3, 3), load(0), now_s=1.0) == "wait", "nothing to compare with"


def test_chance_of_errors_is_that_of_fishers_exact_test():
    assert chance_of_errors(VersionLoad(20, 3), VersionLoad(180, 2)) == pytest.approx(0.00759292634877958)


def test_canary_with_a_p95_beyond_the_ratio_is_rolled_back_when_its_time_is_over():
    old = load(540)
    assert verdict(load(60, first_s=0.2), old) == "roll back"
    assert verdict(load(60, whole_s=2.0), old) == "roll back"
    assert verdict(load(60, whole_s=2.0), old, now_s=599.0) == "wait"
    assert verdict(load(60, first_s=0.12), old) == "promote"
    assert verdict(load(60, first_s=0.004), load(540, first_s=0.001)) == "promote", "within the slack"
