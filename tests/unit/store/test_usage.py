"""What keys have spent is told without reading what others have, and a long time of it some rows at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.store.database import Database
from appliance.store.records import keys, usage

HOURS = 300


@pytest.fixture
def db(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as opened:
        for name, owner in (("ann-1", "ann"), ("ann-2", "ann"), ("ben", "ben")):
            made, _ = keys.create(opened, name, ["inference"], owner)
            spent = {"key": made.id, "requests": 1, "errors": 0, "prompt_tokens": 2, "completion_tokens": 3}
            for hour in range(HOURS):
                usage.add(opened, [{**spent, "model": f"m{hour % 2}", "version": "v1"}], hour * usage.HOUR_S)
        yield opened


def test_tokens_since_sums_what_a_key_has_spent(db: Database):
    ben = keys.find(db, "ben")
    assert ben is not None and usage.tokens_since(db, ben.id, usage.DAY_S) == 5 * (HOURS - 24)


@pytest.mark.parametrize("by", ["key", "owner", "model", "version", "hour"])
@pytest.mark.parametrize("owner", [None, "ann"])
def test_report_counts_each_request_once(db: Database, by: usage.By, owner):
    rows = usage.report(db, by, 0.0, 1e9, owner)
    assert sum(row.requests for row in rows) == (2 if owner else 3) * HOURS


def test_a_report_by_hour_has_the_newest_ones(db: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "_MOST_HOURS", 2)
    assert [row.name for row in usage.report(db, "hour", 0.0, 1e9)] == ["1970-01-13T10:00Z", "1970-01-13T11:00Z"]
