"""The names of checkpoints and adapters, of which one owner may have ten thousand: each round of the scheduler and each
table of the gateways asks for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from appliance.store.database import Database
from appliance.store.kept_rows import KeptRows
from appliance.store.objects import adapters, job_records, models
from appliance.store.objects.adapters import AdapterRow
from appliance.store.objects.job_records import CheckpointNameRow


class CallableNames:
    """One for a controller, on its loop's thread."""

    def __init__(self, db: Database) -> None:
        self._db = db
        tables = {"models": "ROW.id", **dict.fromkeys(("versions", "checkpoints", "canaries"), "ROW.model")}
        self._adapters = KeptRows[AdapterRow](db, tables, _adapters)
        self._checkpoints = KeptRows[CheckpointNameRow](db, {"checkpoints": "ROW.model"}, _checkpoints)

    def adapters(self) -> Mapping[str, AdapterRow]:
        """Checkpoints by name."""
        rows = self._adapters.all()
        active = models.active_among(self._db, {row.base for row in rows})
        return {
            # Written of another model: its base answers with another version since the row was read.
            row.name: row if row.base_active == (now := active.get(row.base)) else replace(row, base_active=now)
            for row in rows
        }

    def checkpoints(self) -> list[CheckpointNameRow]:
        """Model after model, each one's in order of creation."""
        return self._checkpoints.all()


def _adapters(db: Database, of: Sequence[str] | None) -> Iterator[tuple[str, AdapterRow]]:
    for row in adapters.list_callable(db, of):
        yield row.model, row


def _checkpoints(db: Database, of: Sequence[str] | None) -> Iterator[tuple[str, CheckpointNameRow]]:
    for row in job_records.checkpoint_names(db, of):
        yield row.model, row
