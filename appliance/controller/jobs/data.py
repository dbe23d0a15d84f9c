"""A job's own copies of its files: limits their disk use, compares their rows, and deletes them when the job ends.

Deleting a file frees its owner's byte quota, but not the copies of jobs made from it: without a limit of their own,
repeated upload, submit and delete filled the disk for everyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import Principal
from appliance.store.objects import files, jobs
from appliance.store.objects.jobs import JobData
from appliance.store.rows import JobRow

COPIES = ("train.jsonl", "valid.jsonl")
MOST_ROWS = 1_000_000
"""Rows of a file that are compared, the first ones: their hashes take some 100 MB."""
SHARED_SHARE = 0.1
"""The share of validation rows that are training rows too, from which a warning is given."""

SAME_FILES = (
    "The validation file has the same examples as the training file, so its loss would only repeat the training loss. "
    "Give examples that are not trained on, or no validation_file."
)


def check(context: ControllerContext, row: JobRow, caller: Principal) -> None:
    """Checks whether the owner may have the copies of one more job. Raises ApiError."""
    # The owner may have the copies of as many jobs as his bound of jobs, none larger than this one's.
    now_s = time.time()

    @cache
    def bytes_of(file_id: str) -> int:
        return files.bytes_of(context.db, file_id, now_s=now_s)

    held = sum(copied(context, other, bytes_of) for other in jobs.data_of_unfinished(context.db, row.owner))
    own = JobData(row.id, row.phase, row.training_file, row.validation_file)
    context.quotas.check(caller, "job_data", copied(context, own, bytes_of), used=(0, held))


def copied(context: ControllerContext, row: JobData, bytes_of: Callable[[str], int]) -> int:
    """Bytes of the copies of an unfinished job; while it is being validated, their expected size. bytes_of: of a file
    by its id."""
    folder = context.jobs_dir / row.id
    there = sum(path.stat().st_size for name in COPIES if (path := folder / name).exists())
    if there and row.phase != "validating":
        return there
    given = [file_id for file_id in (row.training_file, row.validation_file) if file_id is not None]
    return max(there, sum(map(bytes_of, given)))


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
