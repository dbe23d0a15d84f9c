"""Takes a person out of the store: what was theirs goes, and what has to stay (usage, audit) loses the name.

A row belongs to its own owner, or to the owner of the key it was made with. The name is taken out of every table that
has an owner, so that a table that is added later is not left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from appliance.store.database import Database, sql_list
from appliance.store.objects import jobs, models
from appliance.store.records import box, keys
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
        *ids(db, "batches", owner, f"status IN ({_listed(UNFINISHED_BATCH)})"),
        *ids(db, "responses", owner, f"status IN ({_listed(UNFINISHED_RESPONSE)})"),
        *ids(db, "eval_runs", owner, f"status IN ({_listed(UNFINISHED_EVAL_RUN)})"),
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
    uploads = f"SELECT id FROM uploads WHERE {_mine(db, 'uploads')}"
    db.delete("upload_parts", f"upload_id IN ({uploads})", [owner])
    for table in ("uploads", "batches", "responses", "idempotency"):
        db.delete(table, _mine(db, table), [owner])


_HAS_TEXTS = (
    "(metadata IS NOT NULL OR integrations IS NOT NULL OR suffix IS NOT NULL OR reason != ''"
    f" OR coalesce(error ->> '$.message', '{NAMELESS}') != '{NAMELESS}')"
)


def forget_texts(db: Database, job_id: str) -> None:
    """What its owner wrote into a job's row. Nothing where the job is gone."""
    if (row := jobs.find(db, job_id)) is not None:
        error = {**row.error, "message": NAMELESS} if row.error else None
        jobs.update(db, job_id, metadata=None, integrations=None, error=error, reason="", suffix=None)


def _names_of_gone(db: Database, owner: str, pseudonym: str) -> dict[str, str]:
    """{name: what it is called from now on}, of models of the owner's jobs that are not there: the owner wrote them, or
    a suffix in them. (Names of models that are there stay, since others call them by these; so do those that another
    owner's job is to make, or made.) Names of checkpoints and versions follow their model's."""
    mine = _mine(db, "jobs")
    gone = db.column(
        f"SELECT DISTINCT output_model FROM jobs WHERE {mine}"
        " AND NOT EXISTS (SELECT 1 FROM models WHERE models.id = output_model)"
        f" AND output_model NOT IN (SELECT output_model FROM jobs WHERE NOT coalesce({mine}, 0))",
        [owner],
    )
    renamed = {}
    for number, name in enumerate(gone, 1):
        base, *suffix = name.rsplit(":", 2)
        renamed[name] = f"{base}::{suffix[1]}" if len(suffix) == 2 else f"{pseudonym}-model-{number}"
    for table, column in (("jobs", "model"), *_COSTS, ("energy", "name")):
        for mark in (models.CHECKPOINT_MARK, models.VERSION_MARK):
            for name in db.column(f"SELECT DISTINCT {column} FROM {table} WHERE instr({column}, '{mark}')"):
                model, _, which = name.partition(mark)
                if model in renamed:
                    renamed[name] = f"{renamed[model]}{mark}{which}"
    return {name: new for name, new in renamed.items() if new != name}


_COSTS = (("usage", "model"), ("device_time", "model"))
_DRAWN = (("jobs", "output_model"), ("jobs", "model"), *_COSTS)


def pseudonymise(db: Database, owner: str, pseudonym: str) -> dict[str, str]:
    """Rename the owner in everything that stays: keys, jobs, other tables with an owner, requesters, and the audit log.
    The texts of jobs have gone before (`retention.delete_texts_of_job`). Returns the new name of each deleted model
    that had the owner's. It reads whole tables: call it on a thread."""
    known, names, gone = keys_of(db, owner), _names(db, owner), _names_of_gone(db, owner, pseudonym)
    among = ", ".join("?" * len(names))
    log = _audit_texts(db, owner, pseudonym, gone)
    handovers = db.column(f"SELECT id FROM handovers WHERE detail ->> '$.asked_by' IN ({among})", names)
    with db.transaction():
        since = _audit_texts(db, owner, pseudonym, gone, log.last)
        for table, column in _DRAWN:
            renamed = [[new, name] for name, new in gone.items()]
            db.many(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", renamed)
        for job_id in ids(db, "jobs", owner, _HAS_TEXTS):  # hardly any: they went job by job
            forget_texts(db, job_id)
        db.many("UPDATE audit SET detail = ?, target = ? WHERE seq = ?", [*log.changes, *since.changes])
        # What a request of an administrator has changed, kept in case it comes again, names models.
        # Where the name is a part of another word it is somebody else's: of an owner "e" all that came again was new.
        statement = "SELECT seq, resource_id FROM idempotency WHERE instr(lower(resource_id), ?)"
        changed, word = db.execute(statement, [owner.lower()]).fetchall(), _word(owner)
        again = [[row["seq"]] for row in changed if word.search(row["resource_id"])]
        db.many("DELETE FROM idempotency WHERE seq = ?", again)
        # By the hour of each: it is found by its index.
        drawn = [[new, name] for name, new in gone.items()]
        db.many("UPDATE energy SET name = ? WHERE kind = 'model' AND name = ?", drawn)
        for handover_id in handovers:
            statement = "UPDATE handovers SET detail = json_set(detail, '$.asked_by', ?) WHERE id = ?"
            db.execute(statement, [pseudonym, handover_id])
        db.execute(f"UPDATE model_settings SET by_whom = ? WHERE by_whom IN ({among})", [pseudonym, *names])
        for row in db.execute("SELECT name, value FROM box").fetchall():
            before = json.loads(row["value"])
            if (after := _asked_by_nobody(before, set(names), pseudonym)) != before:
                box.put(db, row["name"], after)
        for number, key in enumerate(known, 1):
            keys.update(db, key.id, name=f"{pseudonym}-{number}", subject="")
        for table in _with_column(db, "owner"):
            db.execute(f"UPDATE {table} SET owner = ?2 WHERE owner = ?1", [owner, pseudonym])
    return gone


# Texts that people write, and what names rows. Not what they say to models: that is their owner's, or was deleted.
_TEXTS = {
    "keys": ("name", "owner", "models"),
    "files": ("filename", "owner"),
    "models": ("id", "owner", "owned_by", "source"),
    "uploads": ("filename", "owner"),
    "jobs": ("suffix", "output_model", "model", "metadata", "integrations", "owner", "reason", "error", "gate"),
    "batches": ("model", "metadata", "errors", "owner"),
    "evals": ("name", "metadata", "kept", "owner"),
    "eval_runs": ("name", "model", "metadata", "error", "owner"),
    "audit": ("target", "detail"),
    "operations": ("target", "progress", "error", "result"),
}
# Many rows say the same: each text is named once. They hold names of models that were deleted, too.
_REPEATED = {
    "usage": ("model",),
    "device_time": ("model", "owner"),
    "energy": ("name",),
    "tier_removals": ("model",),
    "handovers": ("reason", "detail"),
    "handover_steps": ("target", "arguments", "detail"),
    "job_events": ("message",),
    "checkpoints": ("name",),
    "permissions": ("checkpoint", "project_id"),
    "canaries": ("reason",),
    "tasks": ("cursor",),
    "box": ("value",),
}
_SHOWN_CHARACTERS = 200


def _word(owner: str) -> re.Pattern[str]:
    """A name stands for itself: where letters or digits go on before or after it, it is a part of another word."""
    return re.compile(rf"(?<![^\W_]){re.escape(owner)}(?![^\W_])", re.IGNORECASE)


def word_of_bytes(owner: str) -> re.Pattern[bytes]:
    """`_word` for what is looked through as bytes."""
    return re.compile(rb"(?<![^\W_])%b(?![^\W_])" % re.escape(owner.encode()), re.IGNORECASE)


def mentions(db: Database, owner: str) -> list[str]:
    """Where the name still stands as a part of a text, in whatever case: "TABLE ID: COLUMN", oldest first."""
    found, word = [], _word(owner)
    for table, columns in _TEXTS.items():
        there = [column for column in columns if column in _columns(db, table)]
        any_ = " OR ".join(f"instr(lower({column}), ?1)" for column in there)
        for row in db.execute(f"SELECT * FROM {table} WHERE {any_} ORDER BY seq", [owner.lower()]).fetchall():
            found += [f"{table} {row['id']}: {column}" for column in there if word.search(row[column] or "")]
    for table, columns in _REPEATED.items():
        for column in columns:
            texts = db.column(
                f"SELECT DISTINCT {column} FROM {table} WHERE instr(lower({column}), ?1)", [owner.lower()]
            )
            found += [f"{table} {text[:_SHOWN_CHARACTERS]}: {column}" for text in sorted(texts) if word.search(text)]
    return found


class _AuditTexts(NamedTuple):
    """changes: (detail, target, number) of rows of the audit log as they are to be. last: the row that was looked at
    last."""

    changes: list[tuple[str, str, int]]
    last: int


def _audit_texts(db: Database, owner: str, pseudonym: str, gone: Mapping[str, str], after: int = 0) -> _AuditTexts:
    """Takes an owner's names out of the audit log, behind this row, those of models that are gone too, and out of what
    his keys did also the names of files."""
    known = keys_of(db, owner)
    names, key_ids = {**gone, **dict.fromkeys(_names(db, owner), pseudonym)}, {row.id for row in known}
    changes, last = list[tuple[str, str, int]](), after
    for row in db.execute("SELECT seq, key_id, target, detail FROM audit WHERE seq > ? ORDER BY seq", [after]):
        last, detail = row["seq"], _without(json.loads(row["detail"]), names)
        if row["key_id"] in key_ids and "filename" in detail:
            detail["filename"] = NAMELESS
        target = names.get(row["target"], row["target"])
        text = json.dumps(detail, separators=(",", ":"))
        if (text, target) != (row["detail"], row["target"]):
            changes.append((text, target, last))
    return _AuditTexts(changes, last)


def _without(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(one, names) for name, one in value.items()}
    if isinstance(value, list):
        return [_without(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def _asked_by_nobody(value: Any, names: set[str], pseudonym: str) -> Any:
    """A fact about the box (its mode, drained devices) without the names of who has asked for it."""
    if isinstance(value, list):
        return [_asked_by_nobody(one, names, pseudonym) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _asked_by_nobody(one, names, pseudonym) for name, one in value.items()}
    return fields | ({"by": pseudonym} if isinstance(fields.get("by"), str) and fields["by"] in names else {})


def _names(db: Database, owner: str) -> list[str]:
    """The owner's, and those of the owner's keys."""
    return sorted({owner, *(row.name for row in keys_of(db, owner))})


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


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in sorted(values))
