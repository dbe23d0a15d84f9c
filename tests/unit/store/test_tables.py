"""What each table promises beyond keeping rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from appliance.store.database import Database
from appliance.store.errors import DuplicateRow, IllegalTransition, RowNotFound
from appliance.store.objects import jobs
from appliance.store.records import keys
from appliance.store.rows import JobMetricRow, JobRow


def insert_job(db: Database, job_id: str = "ftjob-1", **fields) -> JobRow:
    return jobs.insert(db, JobRow(job_id, "m", "supervised", "f", 1, "ft:m:o:s:12345678", 1.0, **fields))


class TestKeys:
    def test_a_key_is_256_bits_and_kept_only_as_its_hash(self, db: Database, tmp_path: Path):
        row, key = keys.create(db, "laptop", ["inference"])
        assert key.startswith("sk-appl-") and len(key) == len("sk-appl-") + 43
        assert row.sha256 == hashlib.sha256(key.encode()).hexdigest()
        assert key.startswith(row.prefix) and len(row.prefix) <= 12
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert key[12:].encode() not in (tmp_path / "appliance.db").read_bytes()

    def test_two_keys_differ_and_a_live_name_is_taken_until_revoked(self, db: Database):
        first, key = keys.create(db, "ci", ["inference"])
        with pytest.raises(DuplicateRow, match="ci"):
            keys.create(db, "ci", ["inference"])
        keys.revoke(db, "ci")
        second, other = keys.create(db, "ci", ["inference"])
        assert key != other and first.id != second.id
        assert keys.find(db, "ci") == second
        assert [row.id for row in keys.list_live(db)] == [second.id]
        assert len(keys.list_all(db)) == 2

    def test_revoking_twice_keeps_the_first_time_and_an_unknown_name_is_an_error(self, db: Database):
        row, _ = keys.create(db, "ci", ["inference"])
        first = keys.revoke(db, row.id).revoked_s
        assert first is not None and keys.revoke(db, row.id).revoked_s == first
        with pytest.raises(RowNotFound):
            keys.revoke(db, "nobody")


class TestJobs:
    def test_phases_bring_their_times_and_a_finished_job_stays(self, db: Database):
        insert_job(db)
        jobs.set_phase(db, "ftjob-1", "queued")
        jobs.set_phase(db, "ftjob-1", "running", devices=["n0/0", "n0/1"])
        started = jobs.get(db, "ftjob-1")
        assert started.started_s is not None and started.devices == ["n0/0", "n0/1"]
        jobs.update(db, "ftjob-1", eta_s=9.0)
        jobs.set_phase(db, "ftjob-1", "suspended", reason="traffic")
        suspended = jobs.get(db, "ftjob-1")
        assert (suspended.devices, suspended.eta_s, suspended.reason) == ([], None, "traffic")
        jobs.set_phase(db, "ftjob-1", "running", devices=["n0/0"])
        assert jobs.get(db, "ftjob-1").started_s == started.started_s
        jobs.set_phase(db, "ftjob-1", "succeeded")
        assert jobs.get(db, "ftjob-1").finished_s is not None
        for phase in ("running", "failed", "cancelled"):
            with pytest.raises(IllegalTransition, match="succeeded"):
                jobs.set_phase(db, "ftjob-1", phase)  # type: ignore[arg-type]

    def test_a_cancelled_wish_cannot_be_taken_back(self, db: Database):
        insert_job(db, phase="running")
        assert jobs.set_wanted(db, "ftjob-1", "pause").wanted == "pause"
        assert jobs.set_wanted(db, "ftjob-1", "run").wanted == "run"
        jobs.set_wanted(db, "ftjob-1", "cancel")
        assert jobs.set_wanted(db, "ftjob-1", "cancel").wanted == "cancel"
        with pytest.raises(IllegalTransition):
            jobs.set_wanted(db, "ftjob-1", "run")

    def test_a_step_run_again_replaces_its_metrics_but_not_its_validation(self, db: Database):
        insert_job(db)
        jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 1.0, loss=2.0, tokens_per_s=10.0))
        jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 2.0, valid_loss=1.5))
        jobs.upsert_metric(db, JobMetricRow("ftjob-1", 5, 3.0, loss=1.9))
        (row,) = jobs.list_metrics(db, "ftjob-1")
        assert (row.loss, row.valid_loss, row.tokens_per_s, row.created_s) == (1.9, 1.5, 10.0, 3.0)
        jobs.upsert_metric(db, JobMetricRow("ftjob-1", 6, 4.0, loss=1.8))
        assert [row.step for row in jobs.list_metrics(db, "ftjob-1", after_step=5)] == [6]
        assert [row.step for row in jobs.last_metrics(db, "ftjob-1", 1)] == [6]
