"""What is deleted takes what belongs to it."""

from __future__ import annotations

import openai
import pytest

from appliance.store.database import Database
from appliance.store.objects import evals
from appliance.store.rows import EVAL_ITEMS, EvalItemRow, EvalRow, EvalRunRow
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK, given, made

ITEM_BYTES = 128 << 10


def fill(db: Database, eval_id: str, runs: int, items: int, key_id: str | None = None, owner: str = "") -> list[str]:
    """Ended runs with large items."""
    if evals.find(db, eval_id, viewer=None) is None:
        evals.insert(db, EvalRow(eval_id, "n", 0.0, key_id=key_id, owner=owner))
    ids = [f"evalrun_{number}" for number in range(runs)]
    for run_id in ids:
        row = EvalRunRow(run_id, eval_id, "", 0.0, key_id, owner, "completed", ended_s=1.0, bytes=items * ITEM_BYTES)
        evals.insert_run(db, row)
        item = {"x": "x" * ITEM_BYTES}
        for n in range(items):
            EVAL_ITEMS.insert(db, EvalItemRow(f"{run_id}-{n}", run_id, n, 0.0, "pass", item, {}, []))
    return ids


def rows(db: Database, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


async def test_deleted_eval_takes_its_runs_and_items(control: Control):
    control.as_key("carol", owner="carol")
    eval_id = await made(control)
    fill(control.db, eval_id, runs=3, items=7, owner="carol")
    assert (await control.sdk.evals.delete(eval_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await control.sdk.evals.retrieve(eval_id)
    assert [rows(control.db, table) for table in ("evals", "eval_runs", "eval_items")] == [0, 0, 0]


async def test_a_run_that_is_deleted_under_way_ends(control: Control):
    control.as_key("carol")
    eval_id = await made(control, CHECK)
    run = await control.sdk.evals.runs.create(eval_id, data_source=given(("a", "a"), ("b", "b")))
    assert (await control.sdk.evals.runs.delete(run.id, eval_id=eval_id)).deleted
    await control.context.tasks.idle("eval_runs")
    assert rows(control.db, "eval_runs") == rows(control.db, "eval_items") == 0
    assert control.context.background.degraded() == []
