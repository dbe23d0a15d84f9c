"""What one owner holds: everything that any of the owner's keys made."""

from __future__ import annotations

from appliance.store.database import Database, sql_list
from appliance.store.rows import UNFINISHED_BATCH, UNFINISHED_EVAL_RUN, UNFINISHED_PHASES, UNFINISHED_RESPONSE

# A key that is not in the table (the box of a test) is an owner of its own.
_OF = "key_id IN (SELECT ?1 UNION SELECT id FROM keys WHERE owner = (SELECT owner FROM keys WHERE id = ?1))"
_MODELS = "models WHERE kind = 'fine-tuned' AND owner IN (SELECT owner FROM keys WHERE id = ?1)"
_BATCHES = f"batches WHERE status IN ({sql_list(UNFINISHED_BATCH)}) AND {_OF}"
_JOBS = f"jobs WHERE phase IN ({sql_list(UNFINISHED_PHASES)}) AND {_OF}"
_UPLOADS = f"uploads WHERE status = 'pending' AND {_OF}"
_UNFINISHED = (
    _JOBS,
    _BATCHES,
    _UPLOADS,
    f"responses WHERE status IN ({sql_list(UNFINISHED_RESPONSE)}) AND {_OF}",
    f"eval_runs WHERE status IN ({sql_list(UNFINISHED_EVAL_RUN)}) AND {_OF}",
)
ANSWERS_PER_INPUT = 3
"""Answers of a batch are longer than its lines: an error is three times as long as a short one."""


def unfinished(db: Database, key_id: str) -> int:
    """Number of jobs, batches, responses in background, runs of evaluations and uploads that have not ended."""
    return sum(_sum(db, "count(*)", where, key_id) for where in _UNFINISHED)


def models(db: Database, key_id: str) -> int:
    """Number of fine-tuned models, with those that unfinished jobs are going to make."""
    return sum(_sum(db, "count(*)", where, key_id) for where in (_MODELS, _JOBS))


def size(db: Database, key_id: str) -> int:
    """Bytes of files, versions of models, evaluations and their runs; an upload in progress counts twice what it
    announced (the disk holds its parts and the file), an unfinished batch with its answers."""
    inputs = f"files JOIN (SELECT input_file_id FROM {_BATCHES}) ON input_file_id = files.id"
    return (
        sum(_sum(db, "sum(bytes)", f"{table} WHERE {_OF}", key_id) for table in ("files", "evals", "eval_runs"))
        + _sum(db, "sum(versions_bytes)", _MODELS, key_id)
        + 2 * _sum(db, "sum(bytes)", _UPLOADS, key_id)
        + ANSWERS_PER_INPUT * _sum(db, "sum(bytes)", inputs, key_id)
    )


def _sum(db: Database, what: str, where: str, key_id: str) -> int:
    return int(db.value(f"SELECT coalesce({what}, 0) FROM {where}", [key_id]))
