"""Names of versions, adapters and snapshots in every tier, and the rules by which a tier keeps them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from weights.format.config import KeepRules
from weights.format.manifest import Manifest
from weights.format.names import encode_name


class Name(NamedTuple):
    """`kind` is one of `weights.format.manifest.KINDS`."""

    kind: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version} of {self.model}"

    @classmethod
    def of(cls, manifest: Manifest) -> Name:
        return cls(manifest.kind, manifest.model, manifest.version)

    @property
    def key(self) -> str:
        """Its relative path at a remote place. Raises InvalidName."""
        return f"{self.kind}s/{encode_name(self.model)}/{encode_name(self.version)}"


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
            kept |= {record.key for record in [one for one in ranked if one.family == family][: count or 0]}
    return [record.key for record in newest_first if record.key in kept]
