"""The rate of prompts, from streams that had a replica to themselves."""

from __future__ import annotations

import random

import pytest

from appliance.gateway.access.load import LEAST_SAMPLES, prefill_tokens_per_s


def starts(count: int, *, rate: float, fixed_s: float = 0.03, jitter: float = 0.1) -> list[tuple[int, float]]:
    rng = random.Random(7)
    tokens = [rng.choice((100, 300, 900, 2000, 4000)) for _ in range(count)]
    return [(n, (fixed_s + n / rate) * rng.uniform(1 - jitter, 1 + jitter)) for n in tokens]


@pytest.mark.parametrize("rate", [500.0, 20_000.0])
def test_the_rate_is_found_below_the_time_that_every_request_takes(rate):
    assert prefill_tokens_per_s(starts(48, rate=rate)) == pytest.approx(rate, rel=0.2)


def test_a_few_slow_ones_do_not_move_it():
    found = [(n, s + 20.0 if i % 8 == 0 else s) for i, (n, s) in enumerate(starts(48, rate=5000.0))]
    assert prefill_tokens_per_s(found) == pytest.approx(5000.0, rel=0.3)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        starts(LEAST_SAMPLES - 1, rate=5000.0),
        [(500, 0.1 + i / 1000) for i in range(48)],
        starts(48, rate=1e9),
        [(n, 5.0 - n / 1000) for n, _ in starts(48, rate=1.0)],
    ],
    ids=["none", "too few", "all alike", "no longer for long prompts", "shorter for long prompts"],
)
def test_what_does_not_tell_a_rate_gives_none(samples):
    assert prefill_tokens_per_s(samples) is None
