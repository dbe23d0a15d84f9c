"""What owners hold is told, and made less, without reading what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.store.database import Database
from appliance.store.objects import models, uploads
from appliance.store.rows import ModelRow, UploadPartRow, UploadRow, VersionRow
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

    value = Database.value


def test_size_of_what_an_owner_holds_reads_indexes_alone(db: Database) -> None:
    watched = Watched(db)
    holdings.size(watched, "key_1")  # type: ignore[arg-type]
    steps = [step for _, plan in watched.asked for step in plan]
    for table in ("files", "evals", "eval_runs"):
        assert any(step.startswith(f"SEARCH {table} USING COVERING INDEX") for step in steps), steps


KEYS = st.sampled_from(["key_1", "key_2"])
OWNERS = st.sampled_from(["ann", "bob"])
CHANGE = st.one_of(
    st.tuples(st.just("insert"), KEYS, OWNERS, st.integers(0, 1000)),
    st.tuples(st.just("update"), KEYS, OWNERS, st.integers(0, 1000)),
    st.tuples(st.just("delete"), KEYS, OWNERS, st.just(0)),
)


@given(changes=st.lists(CHANGE, max_size=30))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_is_what_would_be_counted(db: Database, changes: list[tuple[str, Any, str, int]]):
    with contextlib.suppress(ZeroDivisionError), db.transaction():
        table, columns = "responses", db.execute("PRAGMA table_info(responses)").fetchall()
        needed = {
            row["name"]: {"TEXT": "completed", "INTEGER": 0, "REAL": 0.0}[row["type"]]
            for row in columns
            if row["notnull"] and row["dflt_value"] is None and not row["pk"]
        }
        for place, (what, key_id, owner, size) in enumerate(changes):
            if what == "insert":
                row = needed | {"id": f"id-{place}", "key_id": key_id, "owner": owner, "bytes": size}
                marks = ", ".join("?" * len(row))
                db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))
            elif what == "update":
                db.execute(
                    f"UPDATE {table} SET key_id = ?, owner = ?, bytes = ?"
                    f" WHERE seq = (SELECT min(seq) FROM {table} WHERE owner != ?2)",
                    [key_id, owner, size],
                )
            else:
                db.execute(f"DELETE FROM {table} WHERE seq = (SELECT max(seq) FROM {table} WHERE owner = ?)", [owner])
            counted = db.execute(
                f"SELECT key_id, owner, count(*), sum(bytes) FROM {table} WHERE key_id IS NOT NULL GROUP BY 1, 2"
            )
            kept = db.execute("SELECT key_id, whose, number, bytes FROM held WHERE kind = ?", [table])
            assert sorted(map(tuple, kept)) == sorted(map(tuple, counted))
        raise ZeroDivisionError  # the next example begins with an empty table


@given(changes=st.lists(st.tuples(st.sampled_from(["insert", "update", "delete"]), st.integers(0, 9)), max_size=30))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_and_versions_are_summed_as_they_change(db: Database, changes: list[tuple[str, int]]):
    with contextlib.suppress(ZeroDivisionError), db.transaction():
        for name in ("a", "b"):
            uploads.insert(db, UploadRow(name, "n", "batch", "text", 9, 1.0, 1.0))
            models.insert(db, ModelRow(name, "base", "llama", 1, 1, "o", "s", 1.0))
        for place, (what, size) in enumerate(changes):
            of = "ab"[size % 2]
            if what == "insert":
                uploads.insert_part(db, UploadPartRow(f"part-{place}", of, size, 1.0))
                models.insert_version(db, VersionRow(of, f"v{place}", "s", size, 1.0))
            for table, whose in (("upload_parts", "upload_id"), ("versions", "model")):
                first = f"seq = (SELECT min(seq) FROM {table} WHERE {whose} = ?1)"
                if what == "update":
                    db.execute(f"UPDATE {table} SET bytes = ?2 WHERE {first}", [of, size + 3])
                elif what == "delete":
                    db.execute(f"DELETE FROM {table} WHERE {first}", [of])
        for name in ("a", "b"):
            assert uploads.stored(db, name) == (len(sizes := uploads.sizes(db, name)), sum(sizes.values()))
            kept = db.execute("SELECT versions_bytes FROM models WHERE id = ?", [name]).fetchone()[0]
            assert kept == sum(row.bytes for row in models.list_versions(db, name))
        raise ZeroDivisionError  # the next example begins with empty tables
