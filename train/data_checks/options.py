"""Options of a check and of a preparation, as plain values that go to another process as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from train.data_checks.likeness import LIKE

CheckName = Literal[
    "bad_lines",
    "empty",
    "encoding",
    "duplicates",
    "near_duplicates",
    "too_long",
    "contaminated",
    "language",
    "personal_data",
    "toxic",
]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
"""Names of the checks, in the order of a report."""
ANY = "-"
ORDERS = ("given", "shuffled", "length")
_LEAST_LIKE = 0.7  # below it, MinHash finds too few of them


class BadOption(ValueError):
    """An option that makes no sense; the text is shown."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """model: directory with a tokenizer, and a config.json that says how long a context is. max_tokens: instead of
    that. method: of train.methods, or ANY. against: validation file. words: the user's own list. like: least likeness
    of near duplicates. leave_out: names of CHECKS."""

    model: Path | None = None
    max_tokens: int | None = None
    method: str = ANY
    against: Path | None = None
    words: Path | None = None
    like: float = LIKE
    leave_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises BadOption."""
        if unknown := [name for name in self.leave_out if name not in CHECKS]:
            raise BadOption(f"there is no check {unknown[0]!r}; expected one of {', '.join(CHECKS)}")
        if not _LEAST_LIKE <= self.like <= 1:
            raise BadOption(f"the least likeness is {self.like}; expected {_LEAST_LIKE} to 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadOption(f"the most tokens are {self.max_tokens}; expected 1 or more")

    def does(self, check: str) -> bool:
        return check not in self.leave_out


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Changes to a file; none by default.

    drop: names of CHECKS whose findings are left out. mask: personal data is masked. split: share of examples that go
    into a validation file. mix: (file, share of the result) of several; a file without a share gets the rest. order:
    one of ORDERS. seed: of the random choices.
    """

    drop: Sequence[str] = ()
    mask: bool = False
    split: float | None = None
    mix: Sequence[tuple[Path, float]] = field(default_factory=tuple)
    order: str = "given"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises BadOption."""
        if unknown := [name for name in self.drop if name not in CHECKS]:
            raise BadOption(f"there is no check {unknown[0]!r}; expected one of {', '.join(CHECKS)}")
        if self.split is not None and not 0 < self.split < 1:
            raise BadOption(f"the share of the validation file is {self.split}; expected more than 0 and less than 1")
        if self.order not in ORDERS:
            raise BadOption(f"the order is {self.order!r}; expected one of {', '.join(ORDERS)}")
        if any(not share > 0 for _, share in self.mix) or sum(share for _, share in self.mix) > 1 + 1e-9:
            raise BadOption("the shares of a mix are more than 0, and together at most 1")
