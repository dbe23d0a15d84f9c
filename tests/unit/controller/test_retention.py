"""What is kept for how long: nothing goes without being asked for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from appliance.controller import retention
from appliance.controller.interfaces.config import RetentionSettings
from appliance.controller.retention import DAY_S
from appliance.store.database import Database
from appliance.store.objects import batches, files, job_records, jobs, models
from appliance.store.records import audit, handovers, keys, operations, usage
from appliance.store.rows import (
    AuditRow,
    BatchRow,
    CheckpointRow,
    FileRow,
    HandoverRow,
    HandoverStepRow,
    JobEventRow,
    JobJudgeRow,
    JobMetricRow,
    JobRow,
    KeyRow,
    ModelRow,
    OperationRow,
    PermissionRow,
)
from appliance.store.upkeep import retention as drops
from tests.simulator.control_plane import simulated_context

NOW_S = 1_000 * DAY_S
DAYS = dict.fromkeys(
    (
        "files_days",
        "batches_days",
        "job_data_days",
        "job_events_days",
        "audit_days",
        "usage_days",
        "handovers_days",
        "operations_days",
    ),
    10.0,
)
AGES = (20, 5)  # one that goes and one that stays of everything


def job(db: Database, name: str, **fields: object) -> None:
    jobs.insert(
        db,
        JobRow(
            id=name,
            model="starter",
            method="supervised",
            training_file=f"file-of-{name}",
            seed=1,
            output_model="ft",
            created_s=0.0,
            **fields,
        ),
    )  # type: ignore[arg-type]


def filled(db: Database, folder: Path) -> None:
    (folder / "files").mkdir(exist_ok=True)
    for age in AGES:
        at_s = NOW_S - age * DAY_S
        audit.insert(db, AuditRow(f"audit_{age}", None, "a.b", "", "done", "", at_s))
        usage.add(
            db,
            [
                {
                    "key": "k",
                    "model": "m",
                    "version": "v",
                    "requests": 1,
                    "errors": 0,
                    "prompt_tokens": 1,
                    "completion_tokens": 1,
                }
            ],
            at_s,
        )
        usage.devices_held(db, f"job-{age}", 2, at_s - 60)
        usage.devices_held(db, f"job-{age}", 0, at_s)
        handovers.insert(
            db, HandoverRow(f"ho_{age}", "r", "done", at_s, at_s), [HandoverStepRow(f"ho_{age}", 0, "v", "t", "done")]
        )
        operations.insert(db, OperationRow(f"op_{age}", "import", "t", "succeeded", at_s, at_s))
        for status in ("completed", "in_progress"):
            batches.insert(
                db, BatchRow(f"batch_{age}_{status}", "/v1/x", f"file-{status}-{age}", at_s, at_s, status=status)
            )  # type: ignore[arg-type]
            files.insert(db, FileRow(f"file-{status}-{age}", "a", "batch", 1, "", "processed", at_s))
            (folder / "files" / f"file-{status}-{age}").write_text("x")
        for name, ended_s in ((f"job-{age}", at_s), (f"live-{age}", None)):
            job(db, name, phase="running" if ended_s is None else "succeeded", finished_s=ended_s)
            job_records.insert_event(db, JobEventRow(f"ev-{name}", name, "info", "message", "", at_s))
            job_records.upsert_metric(db, JobMetricRow(name, 1, at_s))
            (folder / "jobs" / name).mkdir(parents=True, exist_ok=True)
            (folder / "jobs" / name / "train.jsonl").write_text("secret")
            files.insert(db, FileRow(f"file-of-{name}", "a", "fine-tune", 1, "", "processed", at_s))


def counts(db: Database, folder: Path) -> dict[str, int]:
    tables = (
        "audit",
        "usage",
        "device_time",
        "handovers",
        "handover_steps",
        "operations",
        "batches",
        "files",
        "job_events",
        "job_metrics",
        "jobs",
    )
    found = {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
    return found | {"folders": len(list((folder / "jobs").iterdir())), "bytes": len(list((folder / "files").iterdir()))}


def test_everything_that_grows_goes_after_its_days_and_nothing_that_is_needed(tmp_path: Path, db: Database):
    filled(db, tmp_path)
    before = counts(db, tmp_path)
    every = dict.fromkeys(DAYS)
    retention.keep_house(simulated_context(tmp_path, db, retention=every), NOW_S)
    assert counts(db, tmp_path) == before  # null: for ever
    retention.keep_house(simulated_context(tmp_path, db, retention=DAYS), NOW_S)
    assert counts(db, tmp_path) == {
        "audit": 1,
        "usage": 1,
        "device_time": 1,
        "handovers": 1,
        "handover_steps": 1,
        "operations": 1,
        "batches": 3,
        "files": 6,
        "job_events": 3,
        "job_metrics": 3,
        "jobs": 4,
        "folders": 3,
        "bytes": 3,
    }
    for file_id in ("file-in_progress-20", "file-of-live-20"):
        assert files.find(db, file_id, viewer=None, now_s=0)
    assert not (tmp_path / "jobs" / "job-20").exists() and (tmp_path / "jobs" / "live-20").exists()


def test_a_job_that_runs_for_long_keeps_its_newest_events(tmp_path: Path, db: Database):
    job(db, "long", phase="running")
    job(db, "other", phase="running")
    with db.transaction():
        for n in range(1300):
            job_records.insert_event(db, JobEventRow(f"e{n}", "long", "info", "message", str(n), time.time()))
        job_records.insert_event(db, JobEventRow("o", "other", "info", "message", "", time.time()))
    retention.keep_house(simulated_context(tmp_path, db, retention={"events_per_job": 1000}), NOW_S)
    newest = job_records.page_events(db, "long", after=None, limit=500).data
    older = job_records.page_events(db, "long", after=newest[-1].id, limit=500).data
    assert [event.message for event in [*newest, *older]] == [str(n) for n in range(1299, 299, -1)]
    assert job_records.page_events(db, "long", after=older[-1].id, limit=500).data == []
    assert len(job_records.page_events(db, "other", after=None, limit=2000).data) == 1


def test_of_what_has_ended_each_owner_keeps_the_newest(tmp_path: Path, db: Database):
    (tmp_path / "files").mkdir()
    keys.insert(db, KeyRow("key_a", "a", "1", "sk-a", 0.0, owner="ann", scopes=["fine_tuning"]))
    keys.insert(db, KeyRow("key_b", "b", "2", "sk-b", 0.0, owner="bob", scopes=["admin"]))
    for owner, number in (("ann", 6), ("bob", 2)):
        for n in range(number):
            name = f"{owner}-{n}"
            job(db, name, phase="failed", finished_s=NOW_S, owner=owner)
            job_records.insert_event(db, JobEventRow(f"ev-{name}", name, "info", "message", "", NOW_S))
            (tmp_path / "jobs" / name).mkdir(parents=True)
            (tmp_path / "jobs" / name / "events.jsonl").write_text("{}")
            batches.insert(
                db, BatchRow(f"batch-{name}", "/v1/x", "file-x", NOW_S, NOW_S, status="completed", owner=owner)
            )
    jobs.update(db, "ann-1", output_model="ft:kept")
    models.insert(db, ModelRow("ft:kept", "fine-tuned", "Llama", 1, 1, "ann", "job", NOW_S))
    usage.devices_held(db, "ann-2", 1, NOW_S - 60)  # it ran, and what it held is billed without it
    usage.devices_held(db, "ann-2", 0, NOW_S)
    job(db, "ann-live", phase="running", owner="ann")
    batches.insert(db, BatchRow("batch-live", "/v1/x", "file-x", NOW_S, NOW_S, status="in_progress", owner="ann"))
    job_records.insert_checkpoint(db, CheckpointRow("c", "ann-0", "ft:gone:ckpt", "ft:gone", "v1", 1, NOW_S))
    job_records.insert_permission(db, PermissionRow("p", "ft:gone:ckpt", "proj", NOW_S))
    with db.transaction():
        for n in range(1203):
            audit.insert(db, AuditRow(f"a{n}", "key_a", "job.create", "", "done", "", NOW_S))
            audit.insert(db, AuditRow(f"b{n}", "key_b", "job.create", "", "done", "", NOW_S))
            audit.insert(db, AuditRow(f"c{n}", "gateway", "session.create", "", "refused", "", NOW_S))
            audit.insert(db, AuditRow(f"d{n}", None, "mode.set", "", "done", "", NOW_S))
    kept = {"jobs_per_owner": 2, "batches_per_owner": 3, "audit_rows_per_key": 1000}
    retention.keep_house(simulated_context(tmp_path, db, retention=kept), NOW_S)

    def left(table: str, column: str = "id") -> set[str]:
        return {row[0] for row in db.execute(f"SELECT {column} FROM {table}")}

    # ann-1 stays with its model; of the five others the newest two. Each that had a device stayed for ever.
    assert left("jobs") == {"ann-1", "ann-4", "ann-5", "ann-live", "bob-0", "bob-1"}
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == left("jobs") - {"ann-live"}
    assert left("job_events", "job_id") == left("jobs") - {"ann-live"}
    assert not left("checkpoints") and not left("permissions")
    for by, name in (("owner", "ann"), ("key", "the box itself"), ("model", "starter")):
        found = [s.device_hours for s in usage.report(db, by, 0, NOW_S, "ann") if s.name == name]  # type: ignore[arg-type]
        assert found == [1 / 60], by
    assert not usage.report(db, "owner", 0, NOW_S, "bob")
    assert left("batches") == {"batch-ann-3", "batch-ann-4", "batch-ann-5", "batch-live", "batch-bob-0", "batch-bob-1"}
    bounded, unbounded = (
        {f"{key}{n}" for key in "ac" for n in range(203, 1203)},
        {f"{key}{n}" for key in "bd" for n in range(1203)},
    )
    assert left("audit") == bounded | unbounded


def test_ended_jobs_go_after_their_days_and_what_they_cost_stays(tmp_path: Path, db: Database):
    (tmp_path / "files").mkdir()
    (tmp_path / "jobs").mkdir()
    for name, ended_s in (("old", NOW_S - 20 * DAY_S), ("new", NOW_S - 5 * DAY_S), ("live", None)):
        job(db, name, phase="running" if ended_s is None else "failed", finished_s=ended_s, owner="ann")
        usage.devices_held(db, name, 2, NOW_S - 3600)
        usage.devices_held(db, name, 0, NOW_S)
    retention.keep_house(simulated_context(tmp_path, db, retention={}), NOW_S)
    assert db.value("SELECT count(*) FROM jobs") == 3
    retention.keep_house(simulated_context(tmp_path, db, retention={"jobs_days": 10}), NOW_S)
    assert set(db.column("SELECT id FROM jobs")) == {"new", "live"}
    assert [spent.device_hours for spent in usage.report(db, "owner", 0, NOW_S)] == [6.0]


def test_of_graders_of_ended_jobs_each_owner_keeps_the_newest(tmp_path: Path, db: Database):
    """Two MiB each, and a job stays as long as what it cost is told: they counted for nobody."""
    for owner, phase in (("ann", "failed"), ("bob", "failed"), ("ann", "running")):
        for number in range(9):
            job(db, f"{owner}-{phase}-{number}", phase=phase, owner=owner)
            judge = {"grader": {"type": "x"}}
            job_records.insert_judge(db, JobJudgeRow(f"{owner}-{phase}-{number}", judge))
    bob = [f"bob-failed-{number}" for number in range(2, 9)]
    db.execute("DELETE FROM job_judges WHERE job_id IN (?, ?)", ["bob-failed-0", "bob-failed-1"])
    retention.keep_house(simulated_context(tmp_path, db, retention={"graders_per_owner": 7}), NOW_S)
    left = {row[0] for row in db.execute("SELECT job_id FROM job_judges")}
    running = {f"ann-running-{number}" for number in range(9)}
    assert left == {f"ann-failed-{number}" for number in range(2, 9)} | set(bob) | running
    assert db.execute("SELECT count(*) FROM jobs").fetchone()[0] == 27


def test_a_look_costs_the_same_however_much_is_kept(db: Database):
    """Nothing is scanned that is not old: the first rows say whether anything is."""
    with db.transaction():
        for n in range(3000):
            audit.insert(db, AuditRow(f"audit_{n}", None, "a.b", "", "done", "", NOW_S))
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    db._connection.set_progress_handler(count, 100)
    drops.delete_aged(db, "audit", NOW_S - 1)
    db._connection.set_progress_handler(None, 100)
    assert steps < 40  # of a hundred instructions of SQLite's each


def test_by_default_only_copies_reports_and_what_grows_with_time_alone_go():
    assert {name for name, days in RetentionSettings() if days is not None} == {
        "job_data_days",
        "operations_days",
        "usage_days",
        "handovers_days",
        "events_per_job",
        "jobs_per_owner",
        "graders_per_owner",
        "batches_per_owner",
        "eval_runs_per_owner",
        "audit_rows_per_key",
    }


def test_rows_beyond_their_age_are_found_by_an_index(db: Database, monkeypatch: pytest.MonkeyPatch):
    plans, execute = list[str](), db.execute

    def planned(sql: str, parameters=()):  # type: ignore[no-untyped-def]
        plans.extend(row["detail"] for row in execute(f"EXPLAIN QUERY PLAN {sql}", parameters))
        return execute(sql, parameters)

    monkeypatch.setattr(db, "execute", planned)
    for table in ("audit", "handovers", "operations", "batches", "device_time", "usage", "energy", "job_events"):
        drops.delete_aged(db, table, NOW_S)
    assert not [step for step in plans if step.startswith("SCAN") and "jobs" not in step], plans
