"""Decides what a tier keeps and what it removes. Pure functions of records and a clock.

A tier removes what no rule keeps. A tier without rules keeps everything.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weights.format.config import KeepRules

K = TypeVar("K", bound=Hashable)

HOUR_S = 3600.0


@dataclass(frozen=True)
class Kept(Generic[K]):
    """One version or snapshot for retention. `family` is its model or job; rules apply to each family separately.
    `valid_loss` is None if never measured. `protected` says why it stays regardless of the rules, "" if nothing
    protects it."""

    key: K
    family: str
    created_s: float
    valid_loss: float | None = None
    protected: str = ""


@dataclass(frozen=True)
class TierPlan(Generic[K]):
    """`push`: what to copy to the tier, in order; `drop`: what to remove from it."""

    push: tuple[K, ...]
    drop: tuple[K, ...]


def keep(records: Iterable[Kept[K]], rules: KeepRules, now_s: float) -> set[K]:
    """The keys to keep: of each family the newest `keep_last`, the `keep_best` with the lowest validation loss, the
    newest of every `keep_every_hours`, those younger than `keep_newer_s`, and protected ones."""
    families: dict[str, list[Kept[K]]] = {}
    for record in records:
        families.setdefault(record.family, []).append(record)
    kept: set[K] = set()
    for members in families.values():
        newest_first = sorted(members, key=lambda record: record.created_s, reverse=True)
        kept |= {record.key for record in members if record.protected}
        if rules.keeps_everything:
            kept |= {record.key for record in members}
        kept |= {record.key for record in newest_first[: rules.keep_last or 0]}
        measured = [record for record in newest_first if record.valid_loss is not None]
        best = sorted(measured, key=lambda record: record.valid_loss)  # stable: of equals the newest
        kept |= {record.key for record in best[: rules.keep_best or 0]}
        if rules.keep_every_hours is not None:
            newest_of: dict[int, K] = {}
            for record in newest_first:
                newest_of.setdefault(int(record.created_s // (rules.keep_every_hours * HOUR_S)), record.key)
            kept |= set(newest_of.values())
        if rules.keep_newer_s is not None:
            kept |= {record.key for record in members if now_s - record.created_s < rules.keep_newer_s}
    return kept


def plan_tier(
    above: Iterable[Kept[K]], here: Collection[K], described: Mapping[K, Kept[K]], rules: KeepRules, now_s: float
) -> TierPlan[K]:
    """The copies and removals that make a tier meet its rules: `above` could be copied to it, `here` is in it.

    `described` describes the items of `here`; items that it lacks stay. It pushes the newest first, so that the most
    important state is safe soonest.
    """
    candidates = {record.key: record for record in above}
    judged = candidates | {key: described[key] for key in here if key in described}
    kept = keep(judged.values(), rules, now_s)
    missing = [record for key, record in candidates.items() if key in kept and key not in here]
    return TierPlan(
        push=tuple(record.key for record in sorted(missing, key=lambda record: record.created_s, reverse=True)),
        drop=tuple(key for key in here if key in judged and key not in kept),
    )
