"""What owners hold is told, and made less, without reading what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.store.database import Database
from appliance.store.objects import responses
from appliance.store.rows import ResponseRow
from appliance.store.upkeep import holdings


class Watched:
    """A database, and what was asked of it with the plan for that."""

    def __init__(self, db: Database):
        self._db = db
        self.asked: list[tuple[str, list[str]]] = []

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        plan = [row["detail"] for row in self._db.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
        self.asked.append((sql, plan))
        return self._db.execute(sql, parameters)


@pytest.fixture
def db(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as opened:
        yield opened


@pytest.mark.parametrize("count", [holdings.evals, holdings.eval_runs, holdings.responses, holdings.files])
def test_what_an_owner_holds_is_told_by_an_index_alone(db: Database, count: Any):
    """Evals had none: each request to make or to run one read all of all owners, 3 MiB each, which took 0.3 s."""
    watched = Watched(db)
    count(watched, "key_1")
    (table,) = {step for _, plan in watched.asked[:1] for step in plan if step.startswith(("SEARCH", "SCAN"))} - {
        "SEARCH keys USING COVERING INDEX keys_owned (owner=?)",
        "SCAN CONSTANT ROW",
        "SEARCH keys USING INDEX sqlite_autoindex_keys_1 (id=?)",
    }
    assert "COVERING INDEX" in table and "key_id=?" in table


def test_what_is_still_to_be_answered_is_not_looked_for_among_all_that_was(db: Database):
    watched = Watched(db)
    holdings.background(watched, "key_1")  # type: ignore[arg-type]
    assert any("responses_waiting" in step for _, plan in watched.asked for step in plan)


def test_owners_are_summed_once_however_many_responses_go(db: Database):
    """Summed anew for each hundred, 1,700 that went of 100,000 held the controller's loop for four seconds."""
    with db.transaction():
        for place in range(900):
            owner = "much" if place % 3 else "little"
            text = "x" * 100
            row = ResponseRow(
                f"resp_{place}", f"key_{owner}", "completed", float(place), float(place), 100, text, text, owner=owner
            )
            responses.insert(db, row)
    watched = Watched(db)
    with db.transaction():
        assert responses.shrink(watched, 90_000 - 45_000, 1 << 30) == 450  # type: ignore[arg-type]
    assert sum("GROUP BY" in sql for sql, _ in watched.asked) == 1
    assert not any(step.startswith("SCAN responses") and "COVERING" not in step for _, p in watched.asked for step in p)
    left = {
        owner: db.execute("SELECT count(*) FROM responses WHERE owner = ?", [owner]).fetchone()[0]
        for owner in ("much", "little")
    }
    assert abs(left["much"] - left["little"]) <= 100 and sum(left.values()) == 450
    assert db.execute("SELECT min(used_s) FROM responses WHERE owner = 'much'").fetchone()[0] > 300
