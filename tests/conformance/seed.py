"""Fixtures that openai-python's own API tests expect to find, written straight into a box's store.

Test-only: the product knows nothing of these ids. `reset` may run while a controller has the database open (WAL); it
puts every fixture back into its first state, because those tests delete and cancel objects that the next test reads.
The box should be in mode `serve`, so that the seeded jobs do not start to train.
"""

import hashlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.controller.grading.shapes import sample_object
from appliance.controller.responses.objects import completion_row, queued_row
from appliance.store import evals, files, jobs, keys, models
from appliance.store.database import Database
from appliance.store.rows import (
    BATCHES,
    EVAL_ITEMS,
    UPLOADS,
    BatchRow,
    EvalItemRow,
    EvalRow,
    EvalRunRow,
    FileRow,
    JobEventRow,
    JobRow,
    KeyRow,
    ModelRow,
    UploadRow,
    VersionRow,
)
from appliance.store.rows import RESPONSES as ROWS
from train.data_checks.check import check_training_file
from train.graders.graders import ModelAnswer

JOB = "ft-AF1WoRqd3aJAHsqc9NY7iL8F"
TUNABLE = "gpt-4o-mini"
PLAIN_MODEL = "gpt-6-astra"
JUDGE = "model"
DELETABLE = "ft:gpt-4o-mini:acemeco:suffix:abc123"
PERMITTED = "ft:gpt-4o-mini-2024-07-18:org:weather:B7R9VjQd"
UPLOAD, PART = "upload_abc123", "string"
PART_DATA = b"Example data"
BATCH, BATCH_INPUT = "batch_id", "input_file_id"
RESPONSES = ("resp_677efb5139a88190b512bc3fef8e535d", "response_id")
COMPLETIONS = ("completion_id", "after")
API_KEYS = ("My API Key", "My Admin API Key")
_TALKS = [(("user", f"What is {n} plus 1?"), ("assistant", str(n + 1))) for n in range(12)]
TRAINING_LINES = "".join(
    json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) + "\n" for talk in _TALKS
)
_FILE_IDS = ("file_id", "file-abc123", "after", BATCH_INPUT)


def reset(db: Database, files_dir: Path) -> None:
    """Put all fixtures into their first state, in one transaction."""
    with db.transaction():
        _forget(db)
        for name in (TUNABLE, PLAIN_MODEL, JUDGE):
            _model(db, name, "base", None)
        for name in (DELETABLE, PERMITTED):
            _model(db, name, "fine-tuned", TUNABLE)
        for file_id in _FILE_IDS[:3]:
            _file(db, files_dir, file_id)
        for job_id in (JOB, "after"):
            _job(db, job_id)
        jobs.insert_event(db, JobEventRow("after", JOB, "info", "message", "seeded", time.time()))
        made = {"id": "after", "checkpoint": f"{PERMITTED}:ckpt-step-1", "job_id": JOB, "step": 1}
        models.update_version(db, PERMITTED, "v1", metrics={"train_loss": 1.0}, **made)
        _batches(db, files_dir)
        _upload(db, files_dir.parent / "uploads")
        _keys(db)
        _responses(db)
        _completions(db)
        _evals(db)


def remove(db: Database, files_dir: Path) -> None:
    """Delete the fixtures, the objects that tests made from them, and their keys."""
    with db.transaction():
        _forget(db)
        db.execute("DELETE FROM jobs WHERE model = ?", [TUNABLE])
        db.execute("DELETE FROM keys WHERE id LIKE 'key_conformance%'")
        for row in db.execute("SELECT id FROM files WHERE purpose = 'assistants'").fetchall():
            files.delete(db, row["id"])
            (files_dir / row["id"]).unlink(missing_ok=True)
    for file_id in _FILE_IDS:
        (files_dir / file_id).unlink(missing_ok=True)
    shutil.rmtree(files_dir.parent / "uploads" / UPLOAD, ignore_errors=True)


def add_keys(db: Database) -> None:
    """Add only the keys that those tests use; `remove` deletes them."""
    with db.transaction():
        _keys(db)


def _keys(db: Database) -> None:
    for number, key in enumerate(API_KEYS):
        key_id, scopes = f"key_conformance{number}", ["inference", "fine_tuning", "admin"]
        if keys.find(db, key_id) is None:
            name, fingerprint = f"conformance {number}", keys.fingerprint(key)
            keys.insert(db, KeyRow(key_id, name, fingerprint, key[:6], time.time(), scopes=scopes))


def _forget(db: Database) -> None:
    names = [TUNABLE, PLAIN_MODEL, JUDGE, DELETABLE, PERMITTED]
    marks = ", ".join("?" * len(names))
    db.execute("DELETE FROM jobs WHERE id IN (?, 'after')", [JOB])
    db.execute(f"DELETE FROM models WHERE id IN ({marks})", names)
    db.execute(f"DELETE FROM files WHERE id IN ({', '.join('?' * len(_FILE_IDS))})", list(_FILE_IDS))
    db.execute("DELETE FROM batches WHERE input_file_id = ?", [BATCH_INPUT])
    db.execute("DELETE FROM uploads WHERE id = ?", [UPLOAD])
    db.execute("DELETE FROM evals WHERE id IN ('eval_id', 'after')")
    db.execute("DELETE FROM responses WHERE id IN (?, ?, ?, ?)", [*RESPONSES, *COMPLETIONS])


def _evals(db: Database) -> None:
    now_s = time.time()
    check = {"type": "string_check", "name": "name", "input": "input", "reference": "input", "operation": "eq"}
    for eval_id in ("eval_id", "after"):
        evals.insert(db, EvalRow(eval_id, "seeded", now_s, item_schema={"foo": "bar"}, criteria=[check]))
    source = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"foo": "bar"}}]}}
    for run_id in ("run_id", "after"):
        over = {"status": "completed", "total": 1, "ended_s": now_s}
        evals.insert_run(db, EvalRunRow(run_id, "eval_id", "seeded", now_s, data_source=source, **over))
    result = {"name": "name", "type": "string_check", "passed": True, "score": 1.0}
    sample = sample_object({"messages": []}, [ModelAnswer("bar")])
    for place, item_id in enumerate(("output_item_id", "after")):
        EVAL_ITEMS.insert(db, EvalItemRow(item_id, "run_id", place, now_s, "pass", {"foo": "bar"}, sample, [result]))


def _model(db: Database, name: str, kind: str, base: str | None) -> None:
    now_s = time.time()
    models.insert(
        db,
        ModelRow(
            id=name,
            kind=kind,
            arch="llama",
            params=5_000_000,
            bytes=10_000_000,
            owned_by="org-conformance",  # type: ignore[arg-type]
            source="conformance seed",
            created_s=now_s,
            base=base,
            max_model_len=2048,
            active_version="v1",
        ),
    )
    models.insert_version(db, VersionRow(name, "v1", "conformance seed", 10_000_000, now_s))


def _file(db: Database, files_dir: Path, file_id: str) -> None:
    path = files_dir / file_id
    path.write_text(TRAINING_LINES)
    report = check_training_file(path)
    counts = ("n_examples", "n_tokens_estimate", "longest_example_tokens")
    _insert_file(db, path, "fine-tune", report={name: getattr(report, name) for name in counts})


def _insert_file(db: Database, path: Path, purpose: str, **fields: Any) -> None:
    """Insert the row of an existing file."""
    data = path.read_bytes()
    row = {"filename": f"{purpose}.jsonl", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files.insert(db, FileRow(id=path.name, purpose=purpose, status="processed", created_s=time.time(), **row, **fields))


def _job(db: Database, job_id: str) -> None:
    jobs.insert(
        db,
        JobRow(
            id=job_id,
            model=TUNABLE,
            method="supervised",
            training_file="file-abc123",
            seed=42,
            output_model=f"{DELETABLE}-{job_id}",
            created_s=time.time(),
            metadata={"foo": "string"},
            phase="queued",
        ),
    )


def _upload(db: Database, uploads_dir: Path) -> None:
    now_s = time.time()
    folder = uploads_dir / UPLOAD
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / PART).write_bytes(PART_DATA)
    size, until_s = len(PART_DATA), now_s + 3600
    UPLOADS.insert(db, UploadRow(UPLOAD, "filename", "assistants", "text/plain", size, now_s, until_s))


def _batches(db: Database, files_dir: Path) -> None:
    """Insert a batch to read and cancel, unknown to any runner, and an input file for new batches."""
    body = {"model": PLAIN_MODEL, "input": "1+1?"}
    data = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": body}).encode()
    (files_dir / BATCH_INPUT).write_bytes(data)
    _insert_file(db, files_dir / BATCH_INPUT, "batch")
    now_s = time.time()
    when = (now_s, now_s + 86400)
    for batch_id in (BATCH, "after"):
        row = BatchRow(batch_id, "/v1/responses", BATCH_INPUT, *when, "in_progress", metadata={"foo": "string"})
        BATCHES.insert(db, row)


def _responses(db: Database) -> None:
    """Insert finished background responses: only these can be cancelled (without effect) and streamed later."""
    text = {"type": "output_text", "text": "2", "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    item = {"id": "after", "type": "message", "role": "user", "content": "1+1?"}
    for response_id in RESPONSES:
        row = queued_row({"model": PLAIN_MODEL, "input": [item]}, "key_conformance0", "")
        answer = {**row.response, "id": response_id, "status": "completed", "output": [message]}
        ROWS.insert(db, replace(row, id=response_id, status="completed", response=answer, request=None))


def _completions(db: Database) -> None:
    # The SDK's type of a stored message allows only assistant messages, and its strict validation refuses others.
    asked = {"messages": [{"id": "after", "role": "assistant", "content": "1+1?"}], "metadata": {"foo": "string"}}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "2", "refusal": None}}
    for completion_id in COMPLETIONS:
        about = {"object": "chat.completion", "created": int(time.time()), "model": PLAIN_MODEL}
        answer = {"id": completion_id, **about, "choices": [choice]}
        ROWS.insert(db, completion_row("key_conformance0", "", asked, answer))
