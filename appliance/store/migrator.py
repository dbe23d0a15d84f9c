"""Brings a database's schema up to date: numbered scripts, each once, all that are missing in one transaction.

The table `migrations` has the number of each script that the database has had: scripts land out of order when work on
them overlaps, and numbers that were never used stay free. `user_version` is the highest number; releases before this
table look at nothing else.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path

from appliance.store.copies import keep_copy
from appliance.store.errors import SchemaTooNew

_CREATES = re.compile(r"CREATE TABLE (\w+)|ALTER TABLE (\w+) ADD COLUMN (\w+)")


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Runs the scripts that are missing; `connection` is in autocommit mode. Raises SchemaTooNew, NoRoomForCopy.

    A database that has a schema is copied before (appliance.store.copies), so that the release before can have it back.
    After a script that fails, or a crash, the database is as it was: the release before still opens it. One transaction
    also costs a new database one sync of the disk instead of one for each script.
    """
    scripts = migrations()
    (newest,) = connection.execute("PRAGMA user_version").fetchone()
    if newest > max(scripts):
        raise SchemaTooNew(path, newest, max(scripts))
    if newest and _columns(connection, "migrations") and not _missing(connection, scripts):
        return
    if newest:
        keep_copy(connection, path, newest)
    with _transaction(connection):
        if not _columns(connection, "migrations"):
            connection.execute("CREATE TABLE migrations (number INTEGER PRIMARY KEY)")
            had = [(number,) for number, script in scripts.items() if number <= newest and _done(connection, script)]
            connection.executemany("INSERT INTO migrations VALUES (?)", had)
        for number in _missing(connection, scripts):
            newest = max(newest, number)
            for statement in _statements(scripts[number]):
                connection.execute(statement)
            connection.execute("INSERT INTO migrations VALUES (?)", (number,))
        connection.execute(f"PRAGMA user_version = {newest}")


@cache
def migrations() -> dict[int, str]:
    """The scripts of `migrations/` by number, ascending. A released script is never edited."""
    folder = resources.files("appliance.store") / "migrations"
    scripts = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda e: e.name)
    numbers = [int(entry.name.split("_")[0]) for entry in scripts]
    assert numbers and len(set(numbers)) == len(numbers), f"migrations must have numbers of their own: {numbers}"
    return {number: entry.read_text() for number, entry in zip(numbers, scripts, strict=True)}


def _missing(connection: sqlite3.Connection, scripts: dict[int, str]) -> list[int]:
    applied = {number for (number,) in connection.execute("SELECT number FROM migrations")}
    return [number for number in scripts if number not in applied]


def _done(connection: sqlite3.Connection, script: str) -> bool:
    """Whether a database from before the table has had this script: its first table or column stands for all of it."""
    found = _CREATES.search(script)
    assert found is not None, "a script from before the table makes a table or a column"
    table, altered, column = found.groups()
    return bool(_columns(connection, table)) if table else column in _columns(connection, altered)


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    # sqlite3's executescript() commits before it starts, which would tear a migration in two.
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if pending.strip():
        yield pending
