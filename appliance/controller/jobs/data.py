"""A job's own copies of its files: compares their rows, and deletes them when the job ends."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from appliance.controller.context.context import ControllerContext

COPIES = ("train.jsonl", "valid.jsonl")
MOST_ROWS = 1_000_000
"""Rows of a file that are compared, the first ones: their hashes take some 100 MB."""
REPEATED_SHARE, SHARED_SHARE = 0.5, 0.1
"""The share of rows that repeat others, or are in both files, from which a warning is given."""

SAME_FILES = (
    "The validation file has the same examples as the training file, so its loss would only repeat the training loss. "
    "Give examples that are not trained on, or no validation_file."
)


def remove(context: ControllerContext, job_id: str) -> None:
    """Delete the copies of a job that has ended: nothing reads them any more."""
    for name in COPIES:
        (context.jobs_dir / job_id / name).unlink(missing_ok=True)


class EqualRows(NamedTuple):
    """rows, distinct: of the training file. held_out, shared: distinct rows of the validation file, and those of them
    that the training file has too."""

    rows: int
    distinct: int
    held_out: int = 0
    shared: int = 0

    @property
    def same_files(self) -> bool:
        return 0 < self.held_out == self.shared == self.distinct

    def warnings(self) -> list[str]:
        found = []
        if self.distinct <= REPEATED_SHARE * self.rows:
            found.append(
                f"Only {self.distinct:,} of the {self.rows:,} training examples differ: the model learns the repeated "
                "ones by heart. Remove repeats (`appliance file prepare`) unless they are meant as a weight."
            )
        if self.shared and self.shared >= SHARED_SHARE * self.held_out:
            found.append(
                f"{self.shared:,} of the {self.held_out:,} validation examples are training examples too: the "
                "validation loss looks better than it is. Keep them in one of the files."
            )
        return found


def compare_rows(training: Path, validation: Path | None = None) -> EqualRows:
    """Read both files. Raises OSError."""
    hashes = list(_hashes(training))
    trained = set(hashes)
    if validation is None:
        return EqualRows(len(hashes), len(trained))
    held_out = set(_hashes(validation))
    return EqualRows(len(hashes), len(trained), len(held_out), len(held_out & trained))


def _hashes(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in islice(file, MOST_ROWS):
            yield blake2b(line, digest_size=8).digest()
