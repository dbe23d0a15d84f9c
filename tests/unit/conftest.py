"""Most tests of the controller begin with a new database: its schema is made by the migrations once a process, and
copied from then on (4 ms of processor time instead of 80)."""

from __future__ import annotations

import asyncio
import importlib
import json
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from appliance.store import database, migrator
from train.data_checks import process
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
    """Data is checked and prepared in this process: one of its own imports transformers, or compiled code, for each
    file, for 1 to 2 s of processor time (test_file_work.py and test_data_checks.py of the controller try it)."""
    importlib.import_module("torch")  # which the check would say is not there
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr("appliance.controller.context.file_work.check_apart", check_process.checked)
    monkeypatch.setattr("appliance.controller.data_checks.data_work.DataWork._process", _carried_out)


async def _carried_out(work: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await asyncio.to_thread(process.carried_out, request)
    except process.BadOption:
        raise
    except (process.CheckFailed, OSError, ValueError) as error:
        raise process.CheckFailed(str(error).replace(f"{work._context.files_dir}/", "")) from error
    told: dict[str, Any] = json.loads(json.dumps(answer))
    return told
