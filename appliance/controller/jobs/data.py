"""A job's own copies of its files: limits their disk use, and deletes them when the job ends.

Deleting a file frees its owner's byte quota, but not the copies of jobs made from it: without a limit of their own,
repeated upload, submit and delete filled the disk for everyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import Principal
from appliance.store.objects import files, jobs
from appliance.store.objects.jobs import JobData
from appliance.store.rows import JobRow

COPIES = ("train.jsonl", "valid.jsonl")


def check(context: ControllerContext, row: JobRow, caller: Principal) -> None:
    """Checks whether the owner may have the copies of one more job. Raises ApiError."""
    # The owner may have the copies of as many jobs as his bound of jobs, none larger than this one's.
    now_s = time.time()

    @cache  # a sweep has hundreds of jobs on the same files
    def bytes_of(file_id: str) -> int:
        return files.bytes_of(context.db, file_id, now_s=now_s)

    held = sum(copied(context, other, bytes_of) for other in jobs.data_of_unfinished(context.db, row.owner))
    own = JobData(row.id, row.phase, row.training_file, row.validation_file)
    context.quotas.check_job_data(caller, held, copied(context, own, bytes_of))


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
