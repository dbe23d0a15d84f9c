"""From which snapshot a job goes on: the newest that is whole, in shared memory, beside the job, or in any tier."""

from __future__ import annotations

import logging

from appliance.tiers.tiers import Tiers
from weights.format.errors import StoreFull
from weights.format.names import step_of
from weights.memory.lease import StoredVersion

log = logging.getLogger(__name__)


def newest_snapshot(tiers: Tiers, job_id: str) -> StoredVersion | None:
    """From shared memory or beside the job, or else read in from the nearest tier. Callable from any thread."""
    beside = tiers.beside_job(job_id)
    stores = [tiers.store, *([beside] if (beside.root / "snapshots").is_dir() else [])]
    written = [stored for store in stores for stored in store.list("snapshot", job_id)]
    newest = max(written, key=lambda stored: step_of(stored.version), default=None)
    for name in tiers.snapshots_of(job_id):
        if newest is not None and step_of(name.version) <= step_of(newest.version):
            break
        try:
            try:
                return tiers.bring_in(name)
            except StoreFull:
                return tiers.bring_in(name, tiers.beside_job(job_id))
        except LookupError as error:
            log.error("the job resumes from an older snapshot: %s", error, extra={"job_id": job_id})
    return newest
