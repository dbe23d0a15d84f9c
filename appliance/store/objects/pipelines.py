"""Pipelines by name, and their runs.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself. Which data a run has
chosen, and which runs that ended well have trained on, is {path or file id: [bytes, when it was changed]}, of ten
thousand files at most: it stands in no row that is read for anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Unpack

from appliance.store.database import Database, Page, Part, owned_by
from appliance.store.rows import PipelineRow, PipelineRunRow
from appliance.store.table import Table

RUNS_KEPT = 200
"""Ended runs that are kept of one pipeline."""
_TABLE = Table("pipelines", PipelineRow, called="name")
insert, update, page = _TABLE.insert, _TABLE.update, _TABLE.page_visible
_RUNS = Table("pipeline_runs", PipelineRunRow)
insert_run, find_run, find_run_visible, update_run = _RUNS.insert, _RUNS.find, _RUNS.find_visible, _RUNS.update


def find(db: Database, id_or_name: str, *, viewer: str | None = None) -> PipelineRow | None:
    """An admin who gives a name that several owners have gets the newest."""
    if (row := _TABLE.find_visible(db, id_or_name, viewer=viewer)) is not None:
        return row
    if viewer is not None:
        return of_owner(db, viewer, id_or_name)
    return db.one(PipelineRow, "SELECT * FROM pipelines WHERE name = ? ORDER BY seq DESC LIMIT 1", [id_or_name])


def of_owner(db: Database, owner: str, name: str) -> PipelineRow | None:
    return db.one(PipelineRow, "SELECT * FROM pipelines WHERE owner = ? AND name = ?", [owner, name])


def number_of(db: Database, owner: str) -> int:
    return int(db.value("SELECT count(*) FROM pipelines WHERE owner = ?", [owner]))


def delete(db: Database, pipeline_id: str) -> None:
    """Deletes it with its runs."""
    db.execute("DELETE FROM pipelines WHERE id = ?", [pipeline_id])


def due(db: Database, now_s: float) -> list[str]:
    """Their ids."""
    return db.column("SELECT id FROM pipelines WHERE scheduled AND next_s <= ? ORDER BY next_s", [now_s])


def taken(db: Database, pipeline_id: str) -> dict[str, list[Any]]:
    """The data that runs which ended well have trained on."""
    return _data(db, "SELECT taken FROM pipelines WHERE id = ?", pipeline_id)


def take(db: Database, pipeline_id: str, data: Mapping[str, list[Any]]) -> None:
    """Sets `taken`."""
    db.execute("UPDATE pipelines SET taken = ? WHERE id = ?", [_json(data), pipeline_id])


def chosen(db: Database, run_id: str) -> dict[str, list[Any]]:
    """What a run that goes on has chosen."""
    return _data(db, "SELECT data FROM pipeline_runs WHERE id = ?", run_id)


def choose(db: Database, run_id: str, data: Mapping[str, list[Any]]) -> None:
    nbytes = sum(int(told[0]) for told in data.values())
    db.execute(
        "UPDATE pipeline_runs SET data = ?, data_files = ?, data_bytes = ?, data_sha256 = ? WHERE id = ?",
        [_json(data), len(data), nbytes, sha256_of(data), run_id],
    )


def shorten(db: Database, run_id: str) -> None:
    """A run that has ended keeps how much data it had, and the pipeline's name; the names of the files and what the
    pipeline said go. Ended runs are kept by the hundred."""
    db.execute(
        "UPDATE pipeline_runs SET data = '{}', spec = json_object('name', spec ->> '$.name') WHERE id = ?", [run_id]
    )


def sha256_of(data: Mapping[str, list[Any]]) -> str:
    """The same for the same data, and for no other."""
    return hashlib.sha256(_json(dict(sorted(data.items()))).encode()).hexdigest()


def running(db: Database) -> list[str]:
    """Their ids, oldest first."""
    return db.column("SELECT id FROM pipeline_runs WHERE state = 'running' ORDER BY seq")


def running_of(db: Database, pipeline_id: str) -> PipelineRunRow | None:
    return db.one(
        PipelineRunRow, "SELECT * FROM pipeline_runs WHERE pipeline_id = ? AND state = 'running'", [pipeline_id]
    )


def last_of(db: Database, pipeline_id: str) -> PipelineRunRow | None:
    return db.one(
        PipelineRunRow, "SELECT * FROM pipeline_runs WHERE pipeline_id = ? ORDER BY seq DESC LIMIT 1", [pipeline_id]
    )


def page_runs(db: Database, pipeline_id: str, *, viewer: str | None, **part: Unpack[Part]) -> Page[PipelineRunRow]:
    """Newest first."""
    scope = {"pipeline_id": pipeline_id, **owned_by(viewer)}
    return db.page(PipelineRunRow, "pipeline_runs", scope=scope, **part)


def forget_old_runs(db: Database, pipeline_id: str) -> None:
    db.execute(
        "DELETE FROM pipeline_runs WHERE pipeline_id = ?1 AND state != 'running' AND seq <= coalesce((SELECT seq FROM"
        " pipeline_runs WHERE pipeline_id = ?1 AND state != 'running' ORDER BY seq DESC LIMIT 1 OFFSET ?2), 0)",
        [pipeline_id, RUNS_KEPT],
    )


def _data(db: Database, sql: str, row_id: str) -> dict[str, list[Any]]:
    return dict(json.loads(db.value(sql, [row_id]) or "{}"))


def _json(data: Mapping[str, list[Any]]) -> str:
    return json.dumps(data, separators=(",", ":"))
