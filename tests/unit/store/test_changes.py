"""What a task has changed is counted, and nothing of what others change while it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.store.database import Database, counting_changes
from appliance.store.records import keys


async def test_changes_are_counted_by_task_and_only_if_they_are_kept(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as db:
        keys.create(db, "before", ["inference"])
        with counting_changes() as mine:
            await asyncio.create_task(_other(db))
            assert mine.rows == 0
            with pytest.raises(OSError), db.transaction():
                keys.create(db, "rolled-back", ["inference"])
                raise OSError
            assert mine.rows == 0
            with db.transaction(), db.transaction():
                db.execute("UPDATE keys SET name = name || '-2'")
            assert mine.rows == len(keys.list_all(db)) == 2


async def _other(db: Database) -> None:
    """A task with a count of its own, as each request has."""
    with counting_changes() as own:
        keys.create(db, "other", ["inference"])
    assert own.rows == 1
