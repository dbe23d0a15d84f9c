"""Rows that each round of the scheduler asks for are read again only where they were written, and are what they would
be if all were read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.store import kept_rows
from appliance.store.database import Database
from appliance.store.kept_rows import KeptRows
from appliance.store.objects import adapters, job_records
from appliance.store.objects.callable_names import CallableNames


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "appliance.db") as db:
        yield db


class Rows:
    """Of a table of its own."""

    def __init__(self, db: Database):
        self.db, self.asked = db, list[Sequence[str] | None]()
        db.execute("CREATE TABLE things (seq INTEGER PRIMARY KEY, owner TEXT, text TEXT)")
        self.kept = KeptRows(db, {"things": "ROW.owner"}, self._read)

    def _read(self, db: Database, of: Sequence[str] | None) -> Iterator[tuple[str, str]]:
        self.asked.append(of)
        where = "" if of is None else f"WHERE owner IN ({', '.join('?' * len(of))})"
        for row in db.execute(f"SELECT owner, text FROM things {where} ORDER BY seq", of or ()):
            yield row["owner"], row["text"]

    def add(self, owner: str, text: str) -> None:
        self.db.execute("INSERT INTO things (owner, text) VALUES (?, ?)", [owner, text])


def test_what_was_written_is_read_and_nothing_else(db: Database):
    rows = Rows(db)
    for owner in ("ann", "bob", "ann"):
        rows.add(owner, f"of {owner}")
    assert rows.kept.all() == ["of ann", "of ann", "of bob"]
    assert rows.kept.all() == ["of ann", "of ann", "of bob"] and rows.asked == [None]
    db.execute("UPDATE things SET text = 'other' WHERE owner = 'ann'")
    rows.add("eve", "of eve")
    assert rows.kept.all() == ["other", "other", "of bob", "of eve"] and rows.asked == [None, ["ann", "eve"]]
    db.execute("DELETE FROM things WHERE owner = 'bob'")
    assert rows.kept.by_key() == {"ann": ["other", "other"], "eve": ["of eve"]} and rows.asked[2:] == [["bob"]]


def test_what_a_transaction_has_undone_is_read_again(db: Database):
    rows = Rows(db)
    rows.add("ann", "there")
    assert rows.kept.all() == ["there"]
    with pytest.raises(ZeroDivisionError), db.transaction():
        db.execute("UPDATE things SET text = 'undone'")
        assert rows.kept.all() == ["undone"]
        raise ZeroDivisionError
    assert rows.kept.all() == ["there"]
    with db.transaction():
        db.execute("UPDATE things SET text = 'done'")
        assert rows.kept.all() == ["done"]
    assert rows.kept.all() == ["done"]


def test_much_that_was_written_is_read_at_once(db: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_rows, "MOST_AT_ONCE", 2)
    rows = Rows(db)
    assert rows.kept.all() == []
    for owner in ("ann", "bob", "eve"):
        rows.add(owner, owner)
    assert rows.kept.all() == ["ann", "bob", "eve"] and rows.asked == [None, None]


@pytest.mark.parametrize("seed", range(3))
def test_names_are_those_that_would_be_read(db: Database, seed: int):
    """Whatever is written of models, versions, checkpoints and canaries, in transactions that are undone too."""
    names, dice = CallableNames(db), random.Random(seed)
    db.execute("PRAGMA foreign_keys = OFF")
    for _ in range(200):
        model, version = f"m{dice.randrange(4)}", f"v{dice.randrange(3)}"
        base, now_s = f"m{dice.randrange(4)}", 1.0
        adapter = f'{{"adapter": {{"base": "{base}", "base_version": "v0", "rank": 4}}}}'
        change: tuple[str, list[Any]] = dice.choice(
            [
                ("INSERT OR IGNORE INTO models (id, kind, arch, task, created_s) "
                 "VALUES (?, 'base', 'l', 'generate', 1)",
                 [model]),
                ("UPDATE models SET active_version = ? WHERE id = ?", [version, model]),
                ("DELETE FROM models WHERE id = ?", [model]),
                ("INSERT OR IGNORE INTO versions (model, version, created_s, meta) VALUES (?, ?, 1, ?)",
                 [model, version, adapter if dice.random() < 0.7 else "{}"]),
                ("DELETE FROM versions WHERE model = ? AND version = ?", [model, version]),
                ("INSERT OR IGNORE INTO checkpoints (id, job_id, name, model, version, step, metrics, created_s) "
                 "VALUES (?, 'j', ?, ?, ?, 1, '{}', 1)",
                 [f"{model}{version}", f"{model}:{version}", model, version]),
                ("DELETE FROM checkpoints WHERE model = ?", [model]),
                ("INSERT OR REPLACE INTO canaries (model, version, before, share, created_s, auto, "
                 "watch_s, min_requests, state) "
                 "VALUES (?, ?, 'v0', 0.1, ?, 1, 1, 1, 'running')",
                 [model, version, now_s]),
                ("UPDATE canaries SET state = 'promoted' WHERE model = ?", [model]),
            ]
        )  # fmt: skip
        try:
            with db.transaction():
                db.execute(*change)
                if dice.random() < 0.3:
                    _same(db, names)
                if dice.random() < 0.3:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        if dice.random() < 0.5:
            _same(db, names)
    _same(db, names)


def _same(db: Database, names: CallableNames) -> None:
    assert names.adapters() == {row.name: row for row in adapters.list_callable(db)}
    assert sorted(row.name for row in names.checkpoints()) == sorted(
        row.name for row in job_records.checkpoint_names(db)
    )
