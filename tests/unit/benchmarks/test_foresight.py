"""What foresight is worth, in the fluid model: more is never worse, and the constants are those of arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks._foresight import Box, Foresight, work_of
from benchmarks._traffic import Traffic, made
from scheduler.simulator.engine import EngineModel

BOX = Box(4)


def bursts(seed: int, steps: int = 500) -> np.ndarray:
    """A third of a device of work, and now and then three devices of it for half a minute."""
    rng = np.random.default_rng(seed)
    work = np.full(steps, 0.3 * BOX.step_s)
    for at in rng.integers(0, steps - 25, 5):
        work[at : at + 25] = 3.0 * BOX.step_s
    return work


@pytest.fixture(scope="module")
def policy() -> Foresight:
    return Foresight(bursts(1), [bursts(2), bursts(3)], BOX)


def test_a_split_trains_on_the_rest_and_is_late_where_it_is_too_small(policy: Foresight) -> None:
    two, all_ = policy.split(2), policy.split(4)
    assert two.trained == pytest.approx(2 * BOX.step_s * 500) and all_.trained == 0.0
    assert two.late > 0.2 and all_.late == 0.0


def test_more_foresight_gains_more(policy: Foresight) -> None:
    price = 30.0
    work_s = float(bursts(1).sum())
    gains = [
        found.trained - price * found.late * work_s
        for found in (policy.reached(ahead_s, price) for ahead_s in (0.0, 6.0, 60.0, math.inf))
    ]
    assert gains[0] < gains[1] < gains[3] and gains[2] <= gains[3] * 1.001
    best_split_s = max(split.trained - price * split.late * work_s for split in map(policy.split, range(1, 5)))
    assert gains[0] > best_split_s, "it moves, as it knows its traffic"


def test_work_is_what_the_engine_model_charges() -> None:
    requests = made(Traffic(2.0, seconds=600.0, prompt=1000, output=100), 1)
    work = work_of(requests, EngineModel(), 1.2, tpot_s=0.1)
    prompts_s = sum(requests.prompt) * EngineModel().per_token_s
    assert prompts_s < work.sum() < 3 * prompts_s
