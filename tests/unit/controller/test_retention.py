"""Old data is deleted only after a configured retention period; by default nothing is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.controller import app
from appliance.controller.app import DAY_S
from appliance.controller.files import storage
from appliance.store import files, jobs, usage
from appliance.store.database import Database
from appliance.store.rows import (
    AUDIT,
    BATCHES,
    HANDOVERS,
    OPERATIONS,
    AuditRow,
    BatchRow,
    FileRow,
    HandoverRow,
    JobEventRow,
    JobMetricRow,
    JobRow,
    OperationRow,
)
from tests.simulator.control_plane import simulated_context

NOW_S = 1_000 * DAY_S
DAYS = dict.fromkeys(("files_days", "job_data_days", "records_days", "usage_days", "audit_days"), 10.0)
LEFT = dict.fromkeys(("audit", "usage", "device_time", "handovers", "operations"), 1) | {"files": 6}
LEFT |= dict.fromkeys(("batches", "job_events", "job_metrics", "jobs", "folders", "bytes"), 3)
"""Counts after retention: table -> rows; "folders" -> folders of jobs; "bytes" -> files on disk."""
AGES = (20, 5)  # days: of each kind, the first object is too old and the second is not


def job(db: Database, name: str, **fields: Any) -> None:
    jobs.insert(db, JobRow(name, "starter", "supervised", f"file-of-{name}", 1, "ft", 0.0, **fields))


def filled(db: Database, folder: Path) -> None:
    (folder / "files").mkdir(exist_ok=True)
    spent = {"key": "k", "model": "m", "version": "v", "requests": 1, "errors": 0}
    spent |= {"prompt_tokens": 1, "completion_tokens": 1}
    for age in AGES:
        at_s = NOW_S - age * DAY_S
        AUDIT.insert(db, AuditRow("a.b", "", created_s=at_s))
        usage.add(db, [spent], at_s)
        usage.devices_held(db, f"job-{age}", 2, at_s - 60)
        usage.devices_held(db, f"job-{age}", 0, at_s)
        HANDOVERS.insert(db, HandoverRow(100 - age, "r", at_s, state="done", ended_s=at_s))
        OPERATIONS.insert(db, OperationRow(f"op_{age}", "import", "t", "succeeded", at_s, at_s))
        for status in ("completed", "in_progress"):
            given = f"file-{status}-{age}"
            BATCHES.insert(db, BatchRow(f"batch_{age}_{status}", "/v1/x", given, at_s, at_s, status=status))
            files.insert(db, FileRow(given, "a", "batch", 1, "", "processed", at_s))
            (folder / "files" / given).write_text("x")
        for name, ended_s in ((f"job-{age}", at_s), (f"live-{age}", None)):
            job(db, name, phase="running" if ended_s is None else "succeeded", finished_s=ended_s)
            jobs.insert_event(db, JobEventRow(f"ev-{name}", name, "info", "message", "", at_s))
            jobs.upsert_metric(db, JobMetricRow(name, 1, at_s))
            (folder / "jobs" / name).mkdir(parents=True, exist_ok=True)
            (folder / "jobs" / name / "train.jsonl").write_text("secret")
            files.insert(db, FileRow(f"file-of-{name}", "a", "fine-tune", 1, "", "processed", at_s))


def counts(db: Database, folder: Path) -> dict[str, int]:
    found = {name: len(list((folder / at).iterdir())) for name, at in (("folders", "jobs"), ("bytes", "files"))}
    return {name: db.value(f"SELECT count(*) FROM {name}") for name in LEFT if name not in found} | found


def test_retention_deletes_old_rows_unless_needed(tmp_path: Path, db: Database):
    filled(db, tmp_path)
    before = counts(db, tmp_path)
    app.keep_house(simulated_context(tmp_path, db, retention=dict.fromkeys(DAYS)), NOW_S)
    assert counts(db, tmp_path) == before, "null is for ever"
    app.keep_house(simulated_context(tmp_path, db, retention=DAYS), NOW_S)
    assert counts(db, tmp_path) == LEFT
    for file_id in ("file-in_progress-20", "file-of-live-20"):
        assert files.find(db, file_id, viewer=None, now_s=0)
    assert not (tmp_path / "jobs" / "job-20").exists() and (tmp_path / "jobs" / "live-20").exists()
    app.keep_house(simulated_context(tmp_path, db, retention=DAYS | {"records_days": 1.0}), NOW_S)
    assert counts(db, tmp_path)["handovers"] == 1, "the newest stays: their numbers are never used again"


def test_keep_house_keeps_old_file_of_new_job(tmp_path: Path, db: Database, monkeypatch):
    for name in ("file-first", "file-of-new"):
        files.insert(db, FileRow(name, "a", "fine-tune", 1, "", "processed", 0.0))
    remove = storage.remove

    def removed(context: Any, row: FileRow) -> None:
        remove(context, row)
        job(db, "new")

    monkeypatch.setattr(storage, "remove", removed)
    app.keep_house(simulated_context(tmp_path, db, retention=DAYS), NOW_S)
    assert db.column("SELECT id FROM files") == ["file-of-new"]
