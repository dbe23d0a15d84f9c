"""What holds much and is deleted: unseen at once, off the disk a few rows at a time, counted until then."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from appliance.controller import retention as housekeeping
from appliance.controller.evals import requests
from appliance.store import chunks
from appliance.store.database import Database
from appliance.store.objects import evals, idempotency, job_records, jobs, responses, uploads
from appliance.store.records import keys
from appliance.store.rows import (
    CheckpointRow,
    EvalItemRow,
    EvalRow,
    EvalRunRow,
    IdempotencyRow,
    JobEventRow,
    JobJudgeRow,
    JobMetricRow,
    JobRow,
    PermissionRow,
    ResponseRow,
    UploadPartRow,
    UploadRow,
)
from appliance.store.upkeep import holdings, retention
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK, ended, given, made

ITEM_BYTES = chunks.CHUNK_BYTES // 2


def fill(db: Database, eval_id: str, runs: int, items: int, key_id: str | None = None, owner: str = "") -> list[str]:
    """Ended runs of items so large that three are more than a step deletes."""
    if evals.find(db, eval_id, viewer=None) is None:
        evals.insert(db, EvalRow(eval_id, "n", 0.0, key_id=key_id, owner=owner))
    ids = [f"evalrun_{number}" for number in range(runs)]
    for run_id in ids:
        row = EvalRunRow(run_id, eval_id, "", 0.0, key_id, owner, "completed", ended_s=1.0, bytes=items * ITEM_BYTES)
        evals.insert_run(db, row)
        item = {"x": "x" * ITEM_BYTES}
        evals.insert_items(db, [EvalItemRow(f"{run_id}-{n}", run_id, n, 0.0, "pass", item) for n in range(items)])
    return ids


def rows(db: Database, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_no_step_deletes_more_than_so_many_bytes(tmp_path: Path):
    """One statement for all held the controller's loop for 29 s at 1 GB."""
    with Database(tmp_path / "a.db") as db:
        fill(db, "eval_1", runs=3, items=7)
        evals.delete(db, ["eval_1"])
        left, steps = rows(db, "eval_items"), 0
        while evals.delete_some(db):
            steps += 1
            assert left - rows(db, "eval_items") <= 2
            left = rows(db, "eval_items")
        assert steps >= 3 * 4
        assert [rows(db, table) for table in ("evals", "eval_runs", "eval_items", "eval_deletions")] == [0, 0, 0, 0]


def test_no_step_of_deleting_a_job_deletes_more_than_so_many_rows(tmp_path: Path):
    """One statement took along all that refers to it: of 100,000 events and steps, for seconds."""
    tables = ("job_events", "job_metrics", "checkpoints", "permissions")
    with Database(tmp_path / "a.db") as db:
        jobs.insert(db, JobRow("ftjob-1", "m", "supervised", "file-1", 1, "out", 0.0, phase="succeeded"))
        job_records.insert_judge(db, JobJudgeRow("ftjob-1", {"teacher": "starter"}))
        with db.transaction():
            for number in range(chunks.CHUNK_ROWS * 2 + 1):
                job_records.insert_event(db, JobEventRow(f"e-{number}", "ftjob-1", "info", "message", "x", 0.0))
                job_records.upsert_metric(db, JobMetricRow("ftjob-1", number, 0.0))
                job_records.insert_checkpoint(
                    db, CheckpointRow(f"c-{number}", "ftjob-1", f"m:{number}", "m", "1", 1, 0.0)
                )
                job_records.insert_permission(db, PermissionRow(f"p-{number}", f"m:{number}", "proj", 0.0))
        left = sum(rows(db, table) for table in tables)
        while retention.delete_some_of_job(db, "ftjob-1"):
            now = sum(rows(db, table) for table in tables)
            assert left - now <= chunks.CHUNK_ROWS
            left = now
        assert [rows(db, table) for table in (*tables, "job_judges", "jobs")] == [0] * 6


def test_no_step_of_forgetting_uploads_or_requests_deletes_more_than_so_many_rows(tmp_path: Path):
    with Database(tmp_path / "a.db") as db:
        uploads.insert(db, UploadRow("upload_1", "n", "fine-tune", "", 1, 0.0, 1.0, status="cancelled"))
        with db.transaction():
            for number in range(chunks.CHUNK_ROWS * 2 + 1):
                uploads.insert_part(db, UploadPartRow(f"part_{number}", "upload_1", 1, 0.0))
                idempotency.remember(db, IdempotencyRow("k", "r", f"{number}", "0", "x", 0.0))
        for table, step in (("upload_parts", uploads.forget_some), ("idempotency", idempotency.forget_some)):
            left = rows(db, table)
            while step(db, 5.0):
                assert left - rows(db, table) <= chunks.CHUNK_ROWS
                left = rows(db, table)
            assert not left
        assert rows(db, "uploads") == 0


FEW = {
    "audit": "at most the limit of housekeeping's rounds",
    "canaries": "one of a model",
    "checkpoints": "those of a version, and of a model whose versions have gone",
    "deployments": "one of a model",
    "device_time": "at most the limit of housekeeping's rounds",
    "idempotency": "one of a key",
    "model_settings": "what is more than a model keeps",
    "models": "its versions have gone",
    "model_shares": "one of an owner",
    "page_sessions": "sixteen of a key at most",
    "reserve": "a few rows, which are there to be deleted",
    "standby": "one of a model",
    "tier_removals": "one of a version",
    "usage": "of a command's key, whose hours are few",
    "versions": "one",
}
ONE_OR_LIMITED = re.compile(
    r"WHERE (?:id|seq) = \?|WHERE checkpoint = \? AND id = \?|LIMIT|IN \(\{|WHERE job_id = \?\""
)


def test_every_deletion_is_of_one_row_or_of_so_many():
    """A statement that nobody has judged fails here."""
    found = []
    for file in (Path(__file__).parents[3] / "appliance").rglob("*.py"):
        text = file.read_text()
        for match in re.finditer(r"DELETE FROM (\{?\w+\}?)[^\n]*(?:\n[^\n]*){0,2}", text):
            if match[1] not in FEW and not ONE_OR_LIMITED.search(match[0]):
                found.append((file.name, match[0]))
    assert not found


async def test_what_is_deleted_is_seen_by_nobody_and_counts_until_it_has_left(
    control: Control, monkeypatch: pytest.MonkeyPatch
):
    key_id = control.as_key("carol", owner="carol", bounds={"evals": 1, "eval_bytes": 10 * ITEM_BYTES})
    eval_id = await made(control)
    fill(control.db, eval_id, runs=3, items=7, key_id=key_id, owner="carol")
    may_go_on = asyncio.Event()
    # The deletion alone waits: an evaluation that is made gives way in the midst too.
    monkeypatch.setattr(chunks, "asyncio", SimpleNamespace(sleep=lambda _=0: may_go_on.wait()))
    task = asyncio.create_task(control.sdk.evals.delete(eval_id))
    while not rows(control.db, "eval_deletions"):
        await asyncio.wait([task], timeout=0.001)
    assert rows(control.db, "eval_items") > 15
    assert await control.sdk.evals.list() and (await control.sdk.evals.list()).data == []
    for request in (
        control.sdk.evals.retrieve(eval_id),
        control.sdk.evals.delete(eval_id),
        control.sdk.evals.runs.list(eval_id),
        control.sdk.evals.runs.retrieve("evalrun_1", eval_id=eval_id),
        control.sdk.evals.runs.output_items.list("evalrun_1", eval_id=eval_id),
    ):
        with pytest.raises(openai.NotFoundError):
            await request
    again = await made(control)
    with pytest.raises(openai.APIStatusError, match="bytes"):
        await control.sdk.evals.runs.create(again, data_source=given(("a", "a")))
    may_go_on.set()
    assert (await task).deleted
    await control.app.state.evaluations.tasks.idle()  # it is answered after five seconds, while the deletion goes on
    assert rows(control.db, "eval_items") == rows(control.db, "eval_deletions") == 0
    run = await ended(control, again, given(("a", "a")))
    assert run.status == "completed"


async def test_a_deletion_goes_on_after_a_restart(control: Control):
    fill(control.db, "eval_1", runs=1, items=3)
    evals.delete(control.db, ["eval_1"])
    control.app.state.evaluations.start()
    await control.app.state.evaluations.tasks.idle()
    assert rows(control.db, "eval_items") == rows(control.db, "evals") == 0


async def test_a_run_that_is_deleted_under_way_ends(control: Control):
    control.as_key("carol")
    eval_id = await made(control, CHECK)
    run = await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a"), ("b", "b")))
    assert (await control.sdk.evals.runs.delete(run.id, eval_id=eval_id)).deleted
    await control.app.state.evaluations.tasks.idle()
    assert rows(control.db, "eval_runs") == rows(control.db, "eval_items") == 0
    assert control.context.background.degraded() == []


async def test_runs_that_hold_nothing_count_what_they_were_asked_with(control: Control):
    """What a run says beside its items is up to 256 KiB, which no bound counted: neither for a run that failed."""
    key_id = control.as_key("carol")
    eval_id = await made(control)
    file_id = await control.upload(b"{}\n", purpose="user_data")
    source = {"type": "jsonl", "source": {"type": "file_id", "id": file_id}}
    run = await ended(control, eval_id, source)
    assert run.status == "failed"
    assert holdings.eval_runs(control.db, key_id)[1] >= len(file_id)
    kept = evals.find_run(control.db, (await ended(control, eval_id, given(("a" * 1000, "a")))).id)
    assert kept is not None and 1000 < kept.bytes - requests.ROW_BYTES < 2500


async def test_of_ended_runs_each_owner_keeps_the_newest(control: Control):
    for owner in ("ann", "bob"):
        evals.insert(control.db, EvalRow(f"eval_{owner}", "n", 0.0, owner=owner))
        for number in range(4):
            status = "in_progress" if number == 0 else "completed"
            row = EvalRunRow(f"{owner}-{number}", f"eval_{owner}", "", 0.0, None, owner, status)  # type: ignore[arg-type]
            evals.insert_run(control.db, row)
    kept = control.context.config.retention.model_copy(update={"eval_runs_per_owner": 2})
    config = control.context.config.model_copy(update={"retention": kept})
    control.context.config = config
    await housekeeping.keep_house(control.context, 1e9)
    left = [row["id"] for row in control.db.execute("SELECT id FROM eval_runs ORDER BY id")]
    assert left == [f"{owner}-{number}" for owner in ("ann", "bob") for number in (0, 2, 3)]


async def test_stored_responses_of_a_revoked_key_go_a_few_at_a_time(control: Control):
    row, _ = keys.create(control.db, "laptop", ["inference"])
    text = "x" * ITEM_BYTES
    for number in range(5):
        stored = ResponseRow(f"resp_{number}", row.id, "completed", 0.0, 0.0, ITEM_BYTES, text, "{}", owner=row.owner)
        responses.insert(control.db, stored)
    keys.revoke(control.db, row.id)
    assert responses.keys_without_owners(control.db) == [row.id]
    assert responses.delete_of_key(control.db, row.id) and rows(control.db, "responses") == 3
    await control.app.state.responses.keep_house(0.0)
    assert rows(control.db, "responses") == 0


async def test_of_what_goes_with_an_eval_no_run_is_read_or_ended_first(control: Control, monkeypatch):
    """The items of 32 that waited, a megabyte each, were read and written twice, all of them in one turn of the loop:
    4.4 s."""
    runner, running = control.app.state.evaluations, asyncio.Event()

    async def never(run_id: str) -> None:
        running.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(runner, "_judged", never)
    eval_id = await made(control)
    for _ in range(3):
        await control.sdk.evals.runs.create(eval_id, name="n", data_source=given(("4", "4")))
    await asyncio.wait_for(running.wait(), 60)
    read, find = list[str](), evals.find_run
    monkeypatch.setattr(
        evals, "find_run", lambda db, run_id, **more: (read.append(run_id), find(db, run_id, **more))[1]
    )
    assert (await control.sdk.evals.delete(eval_id)).deleted
    await runner.tasks.idle()
    assert not read and not runner._runs and rows(control.db, "eval_runs") == 0
