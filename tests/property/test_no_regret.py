"""`auto` is not beaten by a number in a configuration file: on traffic drawn at random, and boxes of any size, what it
trains after half an hour is at least 0.99 of what the best split in hindsight trains, at no worse lateness than is
allowed or possible.

Behind `make soak`: a few fixed seeds, and `NO_REGRET_RUNS` (200) of them from `NO_REGRET_SEED` on (by the clock);
it prints both, and what did not hold.

The aim is none: on 42 boxes drawn for it the property held on 31, on 34 others (seeds 77000 to 77033) on 23. Of those
eleven, six are in time and train too little (the best split is barely in time there), and five are late by 0.15 to 0.27
points more than what all devices reach, which is less than 99 %. Bursts larger than all before them (in 2 to 30 s)
explain few of those late requests: at most 8 of 88 to 168 in three of the five, 24 of 97 and 48 of 92 in two.
"""

from __future__ import annotations

import os
import time

import pytest

from scheduler.simulator.regret import Row, measured
from scheduler.simulator.traffic import drawn_box

LEAST_RATIO, MOST_SHORT = 0.99, 0.1
MOST_WRONG = 0.4
"""Of the runs. It has been 0.26 and 0.32; lower it with the policy."""
START_UP_S = 120.0
"""Device seconds that a trial still under way may have cost: a window of little training is measured in stops."""


def held(seed: int, most_requests: int, seconds: float) -> Row:
    kind, devices = drawn_box(seed, most_requests, seconds)
    return measured([kind], devices, f"seed {seed}", seed)


def wrong(row: Row) -> str:
    after = row.after
    if after is None:
        return ""
    lost_hours = after.best_hours - after.auto_hours
    if lost_hours > max((1 - LEAST_RATIO) * after.best_hours, START_UP_S / 3600):
        return f"{row.kind}: {after.auto_hours:.2f} h trained, {after.best_hours:.2f} with {after.best_serving} serving"
    if after.short > MOST_SHORT:
        return f"{row.kind}: {100 * after.auto_in_time:.2f} % in time, {100 * after.best_in_time:.2f} possible"
    return ""


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_the_best_split_in_hindsight_trains_no_more(seed: int) -> None:
    assert not wrong(held(seed, 2500, 3000.0))


@pytest.mark.soak
def test_the_best_split_in_hindsight_trains_no_more_on_traffic_drawn_today() -> None:
    first = int(os.environ.get("NO_REGRET_SEED") or time.time())
    runs = int(os.environ.get("NO_REGRET_RUNS") or 200)
    print(f"NO_REGRET_SEED={first} NO_REGRET_RUNS={runs}")
    found = [text for seed in range(first, first + runs) if (text := wrong(held(seed, 12_000, 4500.0)))]
    print("\n".join(found))
    assert len(found) <= MOST_WRONG * runs, f"{len(found)} of {runs}"
