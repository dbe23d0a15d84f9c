"""The rules by which a tier keeps versions, adapters and snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weights.format.config import KeepRules
from weights.format.names import Name


@dataclass(frozen=True)
class Kept:
    """One version or snapshot for retention. `family` is its model or job; rules apply to each family separately.
    `valid_loss` is None if never measured. A `protected` one stays regardless of the rules."""

    key: Name
    family: str
    created_s: float
    valid_loss: float | None = None
    protected: bool = False


def keep(records: Iterable[Kept], rules: KeepRules) -> list[Name]:
    """The keys to keep, the newest first: of each family the newest `keep_last`, the `keep_best` with the lowest
    validation loss, and protected ones; everything without rules."""
    newest_first = sorted(records, key=lambda record: record.created_s, reverse=True)
    measured = [record for record in newest_first if record.valid_loss is not None]
    best_first = sorted(measured, key=lambda record: record.valid_loss or 0.0)  # stable: of equals the newest
    kept = {record.key for record in newest_first if record.protected or rules.keeps_everything}
    for family in {record.family for record in newest_first}:
        for ranked, count in ((newest_first, rules.keep_last), (best_first, rules.keep_best)):
            kept |= {record.key for record in [record for record in ranked if record.family == family][: count or 0]}
    return [record.key for record in newest_first if record.key in kept]
