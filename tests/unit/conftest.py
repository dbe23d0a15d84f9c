"""Most tests of the controller begin with a new database: its schema is made by the migrations once a process, and
copied from then on (4 ms of processor time instead of 80)."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from appliance.store import database, migrator
from train.methods import check_process

_MIGRATE, _MIGRATIONS = migrator.migrate, migrator.migrations


@cache
def _migrated() -> sqlite3.Connection:
    # Tests with a server of their own open databases in its thread.
    made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _MIGRATE(made, Path(":memory:"))
    return made


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Page by page what `migrate` makes of a new database. One that has anything, and scripts that a test made up, are
    for `migrate` itself."""
    numbers = [connection.execute(f"PRAGMA {name}_version").fetchone()[0] for name in ("schema", "user")]
    if any(numbers) or migrator.migrations is not _MIGRATIONS:
        _MIGRATE(connection, path)
    else:
        _migrated().backup(connection)


@pytest.fixture(scope="session", autouse=True)
def databases_migrated_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "migrate", _migrate)
        yield


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of jobs is checked in this process: one of its own imports transformers for each file, for 2 s of
    processor time (tests/unit/controller/test_file_work.py tries it)."""
    importlib.import_module("torch")  # which the check would say is not there
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr("appliance.controller.context.file_work.check_apart", check_process.checked)
