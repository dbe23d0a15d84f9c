"""Takes an owner out of the store: files and texts go, and what has to stay (usage, audit, jobs) loses the name.

A row belongs to its own owner, or to the owner of the key it was made with. The name is taken out of every table that
has an owner, so that a table that is added later is not left out.
"""

from __future__ import annotations

import json

from appliance.store.database import Database, sql_list
from appliance.store.records import keys
from appliance.store.rows import FINISHED_PHASES, UNFINISHED_BATCH, UNFINISHED_EVAL_RUN, UNFINISHED_RESPONSE, KeyRow

NAMELESS = "(forgotten)"
JOB_GOES_ON = f"phase NOT IN ({sql_list(sorted(FINISHED_PHASES))})"
"""A condition for `ids` of jobs."""


def keys_of(db: Database, owner: str) -> list[KeyRow]:
    return [row for row in keys.list_all(db) if row.owner == owner]


def ids(db: Database, table: str, owner: str, where: str = "1") -> list[str]:
    return db.column(f"SELECT id FROM {table} WHERE {_mine(db, table)} AND {where} ORDER BY seq", [owner])


def unfinished(db: Database, owner: str) -> list[str]:
    """Ids of jobs, batches and responses in background that have not ended."""
    return [
        *ids(db, "jobs", owner, JOB_GOES_ON),
        *ids(db, "batches", owner, f"status IN ({sql_list(UNFINISHED_BATCH)})"),
        *ids(db, "responses", owner, f"status IN ({sql_list(UNFINISHED_RESPONSE)})"),
        *ids(db, "eval_runs", owner, f"status IN ({sql_list(UNFINISHED_EVAL_RUN)})"),
    ]


def models_made(db: Database, owner: str) -> list[str]:
    """Names of models that the owner's jobs made, or that somebody's jobs made of the owner's files; one of several
    versions is enough."""
    files = f"SELECT id FROM files WHERE {_mine(db, 'files')}"
    return db.column(
        f"WITH known AS (SELECT id FROM jobs WHERE {_mine(db, 'jobs')}"
        f" OR training_file IN ({files}) OR validation_file IN ({files}))"
        " SELECT id FROM models WHERE job_id IN known"
        " OR id IN (SELECT model FROM versions WHERE meta ->> '$.job_id' IN known) ORDER BY seq",
        [owner],
    )


def delete(db: Database, owner: str) -> None:
    """Delete the owner's uploads, batches, responses and attempts."""
    for table in ("uploads", "batches", "responses", "idempotency"):
        db.delete(table, _mine(db, table), [owner])


def rename(db: Database, owner: str, pseudonym: str) -> None:
    """Give the owner's keys, jobs and what else stays a pseudonym, also where the audit log, hand-overs, settings and
    the box's mode say who asked. What the owner wrote goes: a job's suffix and metadata, details of what was done. Call
    it on a thread: it reads whole tables."""
    known = keys_of(db, owner)
    names = {owner, *(row.name for row in known)}
    with db.transaction():
        db.execute(
            f"UPDATE jobs SET metadata = NULL, integrations = NULL, suffix = NULL, reason = '',"
            f" error = json_set(error, '$.message', '{NAMELESS}') WHERE {_mine(db, 'jobs')}",
            [owner],
        )
        db.execute("UPDATE audit SET detail = '{}' WHERE key_id IN (SELECT id FROM keys WHERE owner = ?)", [owner])
        for name in names:
            was, now = json.dumps(name), json.dumps(pseudonym)
            db.execute("UPDATE audit SET target = ? WHERE target = ?", [pseudonym, name])
            db.execute("UPDATE audit SET detail = replace(detail, ?1, ?2) WHERE instr(detail, ?1)", [was, now])
            for table, column, field in (("handovers", "detail", "asked_by"), ("box", "value", "by")):
                text = [f'"{field}":{was}', f'"{field}":{now}']
                db.execute(f"UPDATE {table} SET {column} = replace({column}, ?1, ?2) WHERE instr({column}, ?1)", text)
            db.execute("UPDATE model_settings SET by_whom = ? WHERE by_whom = ?", [pseudonym, name])
        for number, key in enumerate(known, 1):
            keys.update(db, key.id, name=f"{pseudonym}-{number}", subject="")
        for table in _with_column(db, "owner"):
            db.execute(f"UPDATE {table} SET owner = ?2 WHERE owner = ?1", [owner, pseudonym])


def _mine(db: Database, table: str) -> str:
    """A condition that the row's owner, or the owner of the key it was made with, is ?1."""
    columns = _columns(db, table)
    conditions = ["owner = ?1"] if "owner" in columns else []
    if "key_id" in columns:
        conditions.append("key_id IN (SELECT id FROM keys WHERE owner = ?1)")
    return f"({' OR '.join(conditions)})"


def _with_column(db: Database, column: str) -> list[str]:
    tables = [row["name"] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [table for table in tables if column in _columns(db, table)]


def _columns(db: Database, table: str) -> set[str]:
    return {row["name"] for row in db.execute(f"PRAGMA table_info({table})")}
