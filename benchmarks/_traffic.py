"""Generates many kinds of request traces from a seed, to test `auto` on traffic for which it was not tuned.

A trace is the sum of clients, as ServeGen (arXiv 2505.09999) found in production: few clients make most of the requests
(shares by Zipf's law), each switches on and off, its gaps are gamma or Weibull distributed with their own coefficient
of variation, prompts have a log-normal body and a Pareto tail, and answers are exponential or bimodal (a short answer,
or a long chain of reasoning). A daily swing scales the rate, and a coarse clock may round arrivals, as in some
published traces.
"""

from __future__ import annotations

import functools
import math
import random
from array import array
from dataclasses import dataclass
from typing import Literal

from benchmarks.simulator.trace import Requests

Gaps = Literal["gamma", "weibull"]

LONGEST_PROMPT, LONGEST_OUTPUT = 100_000, 2_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic.

    per_s: mean requests per second. prompt, output: mean tokens. gap_cv: coefficient of variation of the gaps between a
    client's requests, 1 for a Poisson process. on_s, off_s: mean seconds that a client is on and off (log-normal);
    off_s is 0 for clients that are always on. swing: peak rate divided by lowest rate in a period of period_s. tail:
    share of prompts from the Pareto tail with exponent tail_alpha. reasoning: share of answers with fourfold mean.
    clock_s: arrivals are rounded down to multiples of clock_s; 0 for exact times.
    """

    per_s: float
    seconds: float = 3600.0
    prompt: float = 1000.0
    output: float = 200.0
    clients: int = 30
    gaps: Gaps = "gamma"
    gap_cv: float = 1.0
    on_s: float = 60.0
    off_s: float = 0.0
    swing: float = 1.0
    period_s: float = 3600.0
    prompt_sigma: float = 0.8
    tail: float = 0.0
    tail_alpha: float = 1.4
    reasoning: float = 0.0
    clock_s: float = 0.0


def trace_of(kind: Traffic, seed: int) -> Requests:
    """Return a trace of this kind. The same seed makes the same trace."""
    rng = random.Random(seed)
    shares = [1 / (n + 1) ** 1.2 for n in range(kind.clients)]
    total = sum(shares)
    rows: list[tuple[float, int, int]] = []
    for share in shares:
        # A client that is on only part of the time sends faster while it is on.
        on_part = kind.on_s / (kind.on_s + kind.off_s)
        rows += _of_client(kind, kind.per_s * share / total / on_part, rng)
    rows.sort()
    if not rows:
        rows = [(0.0, _prompt(kind, rng), _output(kind, rng))]
    first_s = rows[0][0]
    return Requests(
        array("d", (row[0] - first_s for row in rows)),
        array("l", (row[1] for row in rows)),
        array("l", (row[2] for row in rows)),
    )


def _of_client(kind: Traffic, per_s: float, rng: random.Random) -> list[tuple[float, int, int]]:
    """Return the requests of one client. The swing scales each gap, which keeps the shape of the distribution."""
    rows = []
    at_s = -rng.random() * (kind.on_s + kind.off_s)
    on_until_s = at_s + _log_normal(kind.on_s, rng)
    while at_s < kind.seconds:
        at_s += _gap_s(kind, rng) / per_s / _swing(kind, max(at_s, 0.0))
        while kind.off_s and at_s > on_until_s:
            off_s = _log_normal(kind.off_s, rng)
            at_s, on_until_s = at_s + off_s, on_until_s + off_s + _log_normal(kind.on_s, rng)
        if 0 <= at_s < kind.seconds:
            seen_s = math.floor(at_s / kind.clock_s) * kind.clock_s if kind.clock_s else at_s
            rows.append((seen_s, _prompt(kind, rng), _output(kind, rng)))
    return rows


def _swing(kind: Traffic, at_s: float) -> float:
    amplitude = (kind.swing - 1) / (kind.swing + 1)
    return 1 - amplitude * math.cos(2 * math.pi * at_s / kind.period_s)


def _gap_s(kind: Traffic, rng: random.Random) -> float:
    """Return a random gap with mean 1."""
    if kind.gap_cv == 1.0:
        return rng.expovariate(1.0)
    if kind.gaps == "gamma":
        shape = 1 / kind.gap_cv**2
        return rng.gammavariate(shape, 1 / shape)
    shape = _weibull_shape(kind.gap_cv)
    return rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape)


@functools.cache
def _weibull_shape(cv: float) -> float:
    """Return the Weibull shape with this coefficient of variation, found by bisection."""
    low, high = 0.2, 20.0
    for _ in range(60):
        shape = (low + high) / 2
        square = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
        low, high = (low, shape) if square < cv * cv else (shape, high)
    return low


def _log_normal(mean: float, rng: random.Random, sigma: float = 0.8) -> float:
    return mean * rng.lognormvariate(-sigma * sigma / 2, sigma)


def _prompt(kind: Traffic, rng: random.Random) -> int:
    if rng.random() < kind.tail:
        # Scaled so that the tail begins at the mean of the body.
        return min(max(int(kind.prompt * rng.paretovariate(kind.tail_alpha)), 1), LONGEST_PROMPT)
    return min(max(int(_log_normal(kind.prompt, rng, kind.prompt_sigma)), 1), LONGEST_PROMPT)


def _output(kind: Traffic, rng: random.Random) -> int:
    mean = kind.output * (4.0 if rng.random() < kind.reasoning else 1.0)
    return min(max(int(rng.expovariate(1 / mean)), 1), LONGEST_OUTPUT)


KINDS: dict[str, Traffic] = {
    "summaries of long texts": Traffic(0.9, prompt=9000, output=250, prompt_sigma=0.5, clients=12),
    "long prompts, on and off": Traffic(0.8, prompt=8000, output=300, clients=6, on_s=60, off_s=120),
    "long prompts, a day's swing": Traffic(1.0, prompt=8000, output=300, swing=5.0, prompt_sigma=1.0),
    "long reasoning, three clients": Traffic(1.0, prompt=800, output=900, reasoning=0.5, clients=3, gap_cv=2.5),
    "long reasoning, tides": Traffic(1.2, prompt=1000, output=800, reasoning=0.4, swing=6.0, period_s=1800),
    "heavy tail of prompts": Traffic(2.5, prompt=2000, output=200, tail=0.15, tail_alpha=1.2),
    "heavy tail, on and off": Traffic(2.0, prompt=2000, output=300, tail=0.1, tail_alpha=1.3, on_s=90, off_s=180),
    "weibull gaps, cv 4": Traffic(3.0, prompt=3000, output=150, clients=8, gaps="weibull", gap_cv=4.0),
    "one client, on and off": Traffic(2.0, prompt=2500, output=250, clients=1, on_s=180, off_s=240),
    "quick swing of ten": Traffic(2.5, prompt=3000, output=200, swing=10.0, period_s=600),
    "coarse clock of three seconds": Traffic(2.5, prompt=3500, output=300, clock_s=3.0),
    "nearly full": Traffic(2.8, prompt=6000, output=400, prompt_sigma=0.6, clients=60),
    "small hours": Traffic(0.15, prompt=4000, output=400, clients=4, gap_cv=2.5),
}
"""Traffic for eight devices; no policy was tuned on it."""
