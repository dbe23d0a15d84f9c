"""What one owner holds: everything that any of the owner's keys made."""

from __future__ import annotations

from appliance.store.database import Database, sql_list
from appliance.store.rows import UNFINISHED_BATCH, UNFINISHED_EVAL_RUN, UNFINISHED_PHASES, UNFINISHED_RESPONSE

# A key that is not in the table (the box of a test) is an owner of its own.
_OF = "key_id IN (SELECT ?1 UNION SELECT id FROM keys WHERE owner = (SELECT owner FROM keys WHERE id = ?1))"
FILES_OF_BATCH, ANSWERS_PER_INPUT = 2, 3


def files(db: Database, key_id: str) -> tuple[int, int]:
    """Number and bytes, with those that unfinished batches are going to make: two files each, and answers that are
    longer than their lines (an error is three times as long as a short one)."""
    number, size = _number_and_bytes(db, f"files WHERE {_OF}", key_id)
    inputs = f"SELECT input_file_id FROM batches WHERE status IN ({sql_list(UNFINISHED_BATCH)}) AND {_OF}"
    unfinished, more = _number_and_bytes(db, f"files JOIN ({inputs}) ON input_file_id = files.id", key_id)
    return number + FILES_OF_BATCH * unfinished, size + ANSWERS_PER_INPUT * more


def uploads(db: Database, key_id: str) -> tuple[int, int]:
    """Number and announced bytes of uploads that are neither complete nor ended."""
    return _number_and_bytes(db, f"uploads WHERE status = 'pending' AND {_OF}", key_id)


def background(db: Database, key_id: str) -> tuple[int, int]:
    """Number and bytes of responses that are still to be answered."""
    return _number_and_bytes(db, f"responses WHERE status IN ({sql_list(UNFINISHED_RESPONSE)}) AND {_OF}", key_id)


def batches(db: Database, key_id: str) -> int:
    """Number of unfinished batches."""
    return _number(db, f"batches WHERE status IN ({sql_list(UNFINISHED_BATCH)}) AND {_OF}", key_id)


def evals(db: Database, key_id: str) -> tuple[int, int]:
    """Number, and bytes of their definitions."""
    return _number_and_bytes(db, f"evals WHERE {_OF}", key_id)


def eval_runs(db: Database, key_id: str) -> tuple[int, int]:
    """Number of unfinished ones, and bytes of all."""
    unfinished = _number(db, f"eval_runs WHERE status IN ({sql_list(UNFINISHED_EVAL_RUN)}) AND {_OF}", key_id)
    return unfinished, _number_and_bytes(db, f"eval_runs WHERE {_OF}", key_id)[1]


def jobs(db: Database, key_id: str) -> int:
    """Number of unfinished jobs."""
    return _number(db, f"jobs WHERE phase IN ({sql_list(UNFINISHED_PHASES)}) AND {_OF}", key_id)


def models(db: Database, key_id: str) -> tuple[int, int]:
    """Number of fine-tuned models, and bytes of all their versions."""
    owned = "models WHERE kind = 'fine-tuned' AND owner IN (SELECT owner FROM keys WHERE id = ?1)"
    _, size = _number_and_bytes(db, f"versions WHERE model IN (SELECT id FROM {owned})", key_id)
    return _number(db, owned, key_id), size


def _number(db: Database, where: str, key_id: str) -> int:
    return int(db.value(f"SELECT count(*) FROM {where}", [key_id]))


def _number_and_bytes(db: Database, where: str, key_id: str) -> tuple[int, int]:
    number, size = db.execute(f"SELECT count(*), coalesce(sum(bytes), 0) FROM {where}", [key_id]).fetchone()
    return number, size
