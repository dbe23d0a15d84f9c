"""Which request made which resource: found, and forgotten, without the million others of a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.store.database import Database
from appliance.store.objects import idempotency
from appliance.store.rows import IdempotencyRow


@pytest.fixture
def db(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as opened:
        for number in range(100):
            key = f"i{number}" if number % 2 else None
            idempotency.remember(opened, IdempotencyRow("k1", "batches", key, "same", f"batch_{number}", float(number)))
        yield opened


def test_those_without_a_key_of_their_own_go_sooner(db: Database):
    idempotency.delete_before(db, 0.0, 50.0)
    left = [
        row["idempotency_key"] for row in db.execute("SELECT idempotency_key FROM idempotency WHERE created_s < 50")
    ]
    assert len(left) == 25 and None not in left
