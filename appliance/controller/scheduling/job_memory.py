"""Checks whether shared memory has room for a job before it begins: it waits in the queue instead of failing later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from appliance.controller.access.naming import resolve
from appliance.controller.jobs.settings import bounds, shape_of
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts
from appliance.store.database import Database
from appliance.store.objects import jobs
from appliance.store.rows import JobRow
from train.methods.methods import method_of
from weights.memory.store import WeightStore


class JobMemory:
    """The loop calls `waits_for` in every round, so a job's constant values are computed once."""

    def __init__(self, db: Database, store: WeightStore, facts: BoxFacts):
        self._db, self._store, self._facts = db, store, facts
        self._numbers = lru_cache(1024)(self._computed)

    def waits_for(self, row: JobRow) -> str:
        """Why this job cannot begin now, in a sentence; "" when it can, or has begun."""
        if row.phase != "queued" or row.snapshot is not None or row.resolved is None:
            return ""
        sizes = tuple(row.allowed_sizes or (1,))
        needed = self._numbers(row.id, sizes)["host"]["needed_bytes"]
        if needed <= self._store.room_bytes(enough_bytes=needed):
            return ""
        return self._verdict(row, replace(self._facts, store_room_bytes=self._store.room_bytes()), sizes).waits

    def host_bytes(self, row: JobRow) -> dict[int, int]:
        """Host memory that the job takes when it starts (`capacity.job`), by the numbers of devices that it may run on,
        ascending."""
        if row.resolved is None:
            return {1: 0}
        sizes = bounds(row, self._facts.devices)[2] or (1,)
        return {size: self._numbers(row.id, (size,))["host_memory"]["job_bytes"] for size in sizes}

    def _computed(self, job_id: str, sizes: tuple[int, ...]) -> dict[str, Any]:
        return self._verdict(jobs.get(self._db, job_id), self._facts, sizes).numbers

    def _verdict(self, row: JobRow, facts: BoxFacts, sizes: Sequence[int]) -> capacity.Verdict:
        base = resolve(self._db, row.model)
        if base is None:  # deleted: its start will report the error
            return capacity.Verdict(True, (), (), {"host": {"needed_bytes": 0}, "host_memory": {"job_bytes": 0}})
        assert row.resolved is not None
        return capacity.job(shape_of(base), row.resolved, sizes, facts, method_of(row.method))
