"""Whether shared memory has room for a job that has not begun: it waits in the queue rather than dying at its end."""

from __future__ import annotations

from appliance.controller import capacity
from appliance.controller.admin_plan import shape_of
from appliance.controller.capacity import BoxFacts
from appliance.controller.naming import resolve
from appliance.store.database import Database
from appliance.store.rows import JobRow
from weights.store import WeightStore


class JobRoom:
    """`waits_for` is asked in every round of the loop, so what never changes of a job is worked out once."""

    def __init__(self, db: Database, store: WeightStore, facts: BoxFacts):
        self._db, self._store, self._facts = db, store, facts
        self._needs: dict[str, int] = {}

    def waits_for(self, row: JobRow) -> str:
        """Why this job cannot begin now, in a sentence; "" when it can, or has begun."""
        if row.phase != "queued" or row.snapshot is not None or row.resolved is None:
            self._needs.pop(row.id, None)
            return ""
        if row.id not in self._needs:
            self._needs[row.id] = self._verdict(row, self._facts).numbers["host"]["needed_bytes"]
        if self._needs[row.id] <= self._store.room_bytes(enough_bytes=self._needs[row.id]):
            return ""
        room = BoxFacts(
            self._facts.devices, self._facts.device_kind, self._facts.device_memory_bytes,
            self._store.budget_bytes, self._store.room_bytes(),
        )  # fmt: skip
        return self._verdict(row, room).waits

    def _verdict(self, row: JobRow, facts: BoxFacts) -> capacity.Verdict:
        base = resolve(self._db, row.model)
        if base is None:  # deleted: starting it will say so
            return capacity.Verdict(True, (), (), {"host": {"needed_bytes": 0}})
        assert row.resolved is not None
        return capacity.job(shape_of(base), row.resolved, row.allowed_sizes or [1], facts)
