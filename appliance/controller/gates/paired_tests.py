"""Tests for two models that were asked the same items: how likely chance alone gives what was found.

Each has a margin: the p-value is the probability of a difference at least as large as the one found if the true one
were `margin`. Small values show that the true difference is larger than the margin. Differences are first minus second.

- pass or fail, without a margin: McNemar's exact test (Q. McNemar, 1947), one-sided;
- pass or fail, with one: the score test of T. Tango (Statistics in Medicine 17, 1998), one-sided;
- rewards: the sign-flip permutation test (R. A. Fisher, 1935): exact for few items, by 10,000 random flips for more, by
  the normal distribution that it comes to beyond 1,000.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

FLIPS = 10_000
_ALL_FLIPS_UP_TO, _RANDOM_UP_TO = 13, 1000
_SEED = 20
"""Fixed, so that the same numbers give the same verdict."""
_Z = 1.959964


def chance_of_passes(gained: int, lost: int, items: int, margin: float = 0.0) -> float:
    """gained: items that the first alone passes; lost: the second alone. margin: of the shares that pass, -1 to 1."""
    if margin == 0:
        return _binomial_tail(gained, gained + lost)
    if items == 0:
        return 1.0
    # The share that the second alone passes, most likely if the true difference were the margin (Tango, formula 8).
    b = -(gained + lost) + (2 * items - gained + lost) * margin
    root = math.sqrt(max(0.0, b * b + 8 * items * lost * margin * (1 - margin)))
    lost_share = min(1.0, max(0.0, -margin, (root - b) / (4 * items)))
    variance = items * (2 * lost_share + margin * (1 - margin))
    over = gained - lost - items * margin
    if variance <= 0:
        return 0.0 if over > 0 else 1.0
    return _normal_tail(over / math.sqrt(variance))


def chance_of_rewards(differences: Sequence[float], margin: float = 0.0) -> float:
    """differences: of the rewards of each item."""
    shifted = [found for one in differences if (found := one - margin) != 0]
    total, count = math.fsum(shifted), len(shifted)
    if count == 0:
        return 1.0
    close = 1e-9 * math.fsum(map(abs, shifted))  # sums of the same numbers in another order
    if count <= _ALL_FLIPS_UP_TO:
        sums = (sum(one if up else -one for one, up in zip(shifted, flips, strict=True)) for flips in _flips(count))
        return sum(one >= total - close for one in sums) / 2**count
    if count > _RANDOM_UP_TO:
        return _normal_tail(total / math.sqrt(math.fsum(one * one for one in shifted)))
    chance, sizes = random.Random(_SEED), [abs(one) for one in shifted]  # noqa: S311 - statistics
    whole = math.fsum(sizes)
    reached = 0
    for _ in range(FLIPS):
        bits = chance.getrandbits(count)
        reached += 2 * sum(size for at, size in enumerate(sizes) if bits >> at & 1) - whole >= total - close
    return (reached + 1) / (FLIPS + 1)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Where the true mean difference lies with about 95 % confidence, by the normal distribution."""
    count = len(differences)
    if count < 2:
        return -math.inf, math.inf
    mean = math.fsum(differences) / count
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (count - 1) / count)
    return mean - _Z * spread, mean + _Z * spread


def _flips(count: int) -> product[tuple[bool, ...]]:
    return product((True, False), repeat=count)


def _binomial_tail(least: int, tries: int) -> float:
    """P(at least `least` heads of a fair coin)."""
    if least <= 0:
        return 1.0
    whole = math.lgamma(tries + 1) - tries * math.log(2)
    terms = (math.exp(whole - math.lgamma(k + 1) - math.lgamma(tries - k + 1)) for k in range(least, tries + 1))
    return min(1.0, math.fsum(terms))


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))
