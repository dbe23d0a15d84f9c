"""Checks whether shared memory has room for a job before it begins: it waits in the queue instead of failing later."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from appliance.controller.access.naming import resolve
from appliance.controller.jobs import devices as job_devices
from appliance.controller.jobs.settings import shape_of
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts
from appliance.store.database import Database
from appliance.store.rows import JobRow
from train.methods.methods import method_of
from weights.memory.store import WeightStore


class JobMemory:
    """The loop calls `waits_for` in every round, so a job's constant values are computed once."""

    def __init__(self, db: Database, store: WeightStore, facts: BoxFacts):
        self._db, self._store, self._facts = db, store, facts
        self._needs: dict[str, int] = {}
        self._host_needs: dict[str, dict[int, int]] = {}

    def waits_for(self, row: JobRow) -> str:
        """Why this job cannot begin now, in a sentence; "" when it can, or has begun."""
        if row.phase != "queued" or row.snapshot is not None or row.resolved is None:
            self._needs.pop(row.id, None)
            return ""
        if row.id not in self._needs:
            self._needs[row.id] = self._verdict(row, self._facts).numbers["host"]["needed_bytes"]
        if self._needs[row.id] <= self._store.room_bytes(enough_bytes=self._needs[row.id]):
            return ""
        return self._verdict(row, replace(self._facts, store_room_bytes=self._store.room_bytes())).waits

    def host_bytes(self, row: JobRow) -> dict[int, int]:
        """Host memory that the job takes when it starts (`capacity.job`), by the numbers of devices that it may run on,
        ascending."""
        if row.resolved is None:
            return {1: 0}
        sizes = job_devices.bounds(row, self._facts.devices)[2] or (1,)
        known = self._host_needs.setdefault(row.id, {})
        for size in sizes:
            if size not in known:
                known[size] = self._verdict(row, self._facts, [size]).numbers["host_memory"]["job_bytes"]
        return {size: known[size] for size in sizes}

    def keep(self, jobs: Container[str]) -> None:
        """Only these jobs are unfinished."""
        self._needs = {job_id: need for job_id, need in self._needs.items() if job_id in jobs}
        self._host_needs = {job_id: need for job_id, need in self._host_needs.items() if job_id in jobs}

    def _verdict(self, row: JobRow, facts: BoxFacts, sizes: Sequence[int] = ()) -> capacity.Verdict:
        base = resolve(self._db, row.model)
        if base is None:  # deleted: its start will report the error
            return capacity.Verdict(True, (), (), {"host": {"needed_bytes": 0}, "host_memory": {"job_bytes": 0}})
        assert row.resolved is not None
        sizes = sizes or row.allowed_sizes or [1]
        return capacity.job(shape_of(base), row.resolved, sizes, facts, method_of(row.method))
