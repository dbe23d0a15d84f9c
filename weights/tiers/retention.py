"""Decides what a tier keeps and what it removes. Pure functions of records.

A tier removes what no rule keeps. A tier without rules keeps everything.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weights.format.config import KeepRules

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Kept(Generic[K]):
    """One version or snapshot for retention. `family` is its model or job; rules apply to each family separately.
    `valid_loss` is None if never measured. A `protected` one stays regardless of the rules."""

    key: K
    family: str
    created_s: float
    valid_loss: float | None = None
    protected: bool = False


@dataclass(frozen=True)
class TierPlan(Generic[K]):
    """`push`: what to copy to the tier, in order; `drop`: what to remove from it."""

    push: tuple[K, ...]
    drop: tuple[K, ...]


def keep(records: Iterable[Kept[K]], rules: KeepRules) -> set[K]:
    """The keys to keep: of each family the newest `keep_last`, the `keep_best` with the lowest validation loss, and
    protected ones."""
    newest_first = sorted(records, key=lambda record: record.created_s, reverse=True)
    measured = [record for record in newest_first if record.valid_loss is not None]
    best_first = sorted(measured, key=lambda record: record.valid_loss or 0.0)  # stable: of equals the newest
    kept = {record.key for record in newest_first if record.protected or rules.keeps_everything}
    for family in {record.family for record in newest_first}:
        for ranked, count in ((newest_first, rules.keep_last), (best_first, rules.keep_best)):
            kept |= {record.key for record in [one for one in ranked if one.family == family][: count or 0]}
    return kept


def plan_tier(
    above: Iterable[Kept[K]], here: Collection[K], described: Mapping[K, Kept[K]], rules: KeepRules
) -> TierPlan[K]:
    """The copies and removals that make a tier meet its rules: `above` could be copied to it, `here` is in it.

    `described` describes the items of `here`; items that it lacks stay. It pushes the newest first, so that the most
    important state is safe soonest.
    """
    candidates = {record.key: record for record in above}
    judged = candidates | {key: described[key] for key in here if key in described}
    kept = keep(judged.values(), rules)
    missing = [record for key, record in candidates.items() if key in kept and key not in here]
    return TierPlan(
        push=tuple(record.key for record in sorted(missing, key=lambda record: record.created_s, reverse=True)),
        drop=tuple(key for key in here if key in judged and key not in kept),
    )
