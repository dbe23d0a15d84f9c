"""Snapshots are as frequent as they are cheap."""

from __future__ import annotations

import pytest

from train.state import cadence
from train.state.cadence import every_s


@pytest.mark.parametrize("cost_s", [0.0, 0.1, 0.7, 5.0, 1e6])
def test_interval_takes_two_percent_within_its_bounds(cost_s):
    found = every_s(cost_s)
    assert cadence.SHORTEST_S <= found <= cadence.LONGEST_S
    assert found in (cadence.SHORTEST_S, cadence.LONGEST_S, pytest.approx(50 * cost_s))
