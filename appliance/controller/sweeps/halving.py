"""Chooses the trials of a sweep, and which of them go on: successive halving (K. Jamieson, A. Talwalkar, AISTATS 2016).
Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """share: of the data. trials: how many take part."""

    share: float
    trials: int


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def drawn(count: int, parameters: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """This many, each parameter from its list of values or its range {"low", "high", "log", "integer"}."""
    chance = random.Random(seed)  # noqa: S311 - a search
    return [{name: _one(chance, among) for name, among in parameters.items()} for _ in range(count)]


def _one(chance: random.Random, among: Any) -> Any:
    if isinstance(among, Sequence):
        return chance.choice(among)
    low, high = among["low"], among["high"]
    value = math.exp(chance.uniform(math.log(low), math.log(high))) if among.get("log") else chance.uniform(low, high)
    return round(value) if among.get("integer") else float(f"{value:.3g}")


def rounds(trials: int, first: float, keep_one_in: int) -> list[Round]:
    """Each round has `keep_one_in` times the data of the one before, and one in `keep_one_in` of its trials. The last
    round has all data, and comes early if only one trial is left."""
    found = [Round(first, trials)]
    while found[-1].share < 1:
        left = math.ceil(found[-1].trials / keep_one_in)
        share = 1.0 if left == 1 else min(1.0, found[-1].share * keep_one_in)
        found.append(Round(share, left))
    return found


def best(losses: Mapping[int, float | None], count: int) -> list[int]:
    """The numbers of the `count` trials with the least loss; trials without a finite loss are left out."""
    known = [(loss, number) for number, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [number for _, number in sorted(known)[:count]]
