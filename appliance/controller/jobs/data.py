"""A job's own copies of its files: compares their rows, and deletes them when the job ends."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from appliance.controller.context.context import ControllerContext

COPIES = ("train.jsonl", "valid.jsonl")
MOST_ROWS = 1_000_000
"""Rows of a file that are compared, the first ones: their hashes take some 100 MB."""
SHARED_SHARE = 0.1
"""The share of validation rows that are training rows too, from which a warning is given."""

SAME_FILES = (
    "The validation file has the same examples as the training file, so its loss would only repeat the training loss. "
    "Give examples that are not trained on, or no validation_file."
)


def remove(context: ControllerContext, job_id: str) -> None:
    """Delete the copies of a job that has ended: nothing reads them any more."""
    for name in COPIES:
        (context.jobs_dir / job_id / name).unlink(missing_ok=True)


def compare_rows(training: Path, validation: Path) -> tuple[bool, list[str]]:
    """Whether both files have the same rows, and a warning if they share many. Raises OSError."""
    trained, held_out = set(_hashes(training)), set(_hashes(validation))
    shared = len(held_out & trained)
    if shared < SHARED_SHARE * len(held_out) or not shared:
        return False, []
    return held_out == trained, [
        f"{shared:,} of the {len(held_out):,} validation examples are training examples too: the validation loss looks "
        "better than it is. Keep them in one of the files."
    ]


def _hashes(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in islice(file, MOST_ROWS):
            yield blake2b(line, digest_size=8).digest()
