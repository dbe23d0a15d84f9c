"""Snapshots are as frequent as they are cheap."""

from __future__ import annotations

import pytest

from tests.train_support.specs import host_spec
from train.plan.auto import Given
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.spec import TrainSpec
from train.state import cadence
from train.state.cadence import every_s


@pytest.mark.parametrize("cost_s", [0.0, 0.1, 0.7, 5.0, 1e6])
def test_interval_takes_two_percent_within_its_bounds(cost_s):
    found = every_s(cost_s)
    assert cadence.SHORTEST_S <= found <= cadence.LONGEST_S
    assert found in (cadence.SHORTEST_S, cadence.LONGEST_S, pytest.approx(50 * cost_s))


def test_spec_takes_automatic_and_numbers():
    assert TrainSpec.from_json(host_spec().to_json()).snapshot_every_s is None
    assert TrainSpec.from_json(host_spec(snapshot_every_s=2.0).to_json()).snapshot_every_s == 2.0
    with pytest.raises(InvalidSpec, match="snapshot_every_s"):
        host_spec(snapshot_every_s=-1.0)
    assert Given({"snapshot_every_s": "auto"}).maybe_number("snapshot_every_s", 0, 9) is None
    assert Given({"snapshot_every_s": 2}).maybe_number("snapshot_every_s", 0, 9) == 2.0
    with pytest.raises(InvalidHyperparameter):
        Given({"snapshot_every_s": 10}).maybe_number("snapshot_every_s", 0, 9)
