"""Gates: one row for each job whose version is judged before it answers.

viewer: the owner who asks, and who sees only what is his; None for an admin or the box itself.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Unpack

from appliance.store.database import Database, Page, Part, owned_by
from appliance.store.rows import GateRow
from appliance.store.table import Table

_LONG = {"terms": "'{}' AS terms", "told": "'[]' AS told"}
_OUTLINE = ", ".join(_LONG.get(one.name, one.name) for one in fields(GateRow))
_WITHOUT_TERMS = ", ".join(_LONG["terms"] if one.name == "terms" else one.name for one in fields(GateRow))
_TABLE = Table("gates", GateRow)
insert, find, find_visible, update = _TABLE.insert, _TABLE.find, _TABLE.find_visible, _TABLE.update


def of_job(db: Database, job_id: str) -> GateRow | None:
    """The gate without its terms: nobody who looks at a job wants them, and the runs of an owner's pipelines are looked
    at every second."""
    return db.one(GateRow, f"SELECT {_WITHOUT_TERMS} FROM gates WHERE job_id = ?", [job_id])


def of_version(db: Database, model: str, version: str) -> GateRow | None:
    """The newest that has judged this version."""
    return db.one(
        GateRow, "SELECT * FROM gates WHERE model = ? AND version = ? ORDER BY seq DESC LIMIT 1", [model, version]
    )


def of_model(db: Database, model: str, limit: int = 20) -> list[GateRow]:
    """Newest first, as `outline` has them: the terms of ten may be 5 MiB."""
    return db.all(GateRow, f"SELECT {_OUTLINE} FROM gates WHERE model = ? ORDER BY seq DESC LIMIT ?", [model, limit])


def unfinished(db: Database) -> list[str]:
    """Their ids, oldest first."""
    return db.column("SELECT id FROM gates WHERE state != 'ended' ORDER BY seq")


def outline(db: Database, gate_id: str) -> GateRow | None:
    """The gate without its terms and without what was found: they may be long, and a gate is looked at every second."""
    return db.one(GateRow, f"SELECT {_OUTLINE} FROM gates WHERE id = ?", [gate_id])


def suites_of(db: Database, gate_id: str) -> int:
    """How many suites it has."""
    sql = "SELECT json_array_length(terms, '$.suites') FROM gates WHERE id = ?"
    return int(db.value(sql, [gate_id]) or 0)


def canary_of(db: Database, gate_id: str) -> dict[str, Any] | None:
    """The terms of its canary, alone: it may wait for days until another one has ended. None: it has none."""
    found = db.value("SELECT terms -> '$.canary' FROM gates WHERE id = ?", [gate_id])
    return json.loads(found) if found else None


def page(
    db: Database, *, viewer: str | None, model: str | None, job_id: str | None, **part: Unpack[Part]
) -> Page[GateRow]:
    """Newest first."""
    where, parameters = "(? IS NULL OR model = ?) AND (? IS NULL OR job_id = ?)", [model, model, job_id, job_id]
    return db.page(GateRow, "gates", scope=owned_by(viewer), where=where, parameters=parameters, **part)
