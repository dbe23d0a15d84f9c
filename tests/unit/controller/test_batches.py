"""/v1/batches, called by the OpenAI SDK, with scripted engines; and limits against hostile input files."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.files import storage
from appliance.controller.openai import batches
from appliance.controller.openai.batches import Lines, read_lines
from appliance.store.rows import BATCHES
from tests.simulator.control_plane import change
from tests.unit.controller.conftest import Control

URL = "/v1/chat/completions"
DEEP = json.loads("[" * 300 + "]" * 300)
"""orjson reads 1,024 levels and writes 254."""


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "starter", "messages": [{"role": "user", "content": f"{number}+1?"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body} | changes


def jsonl(rows: list[Any]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


async def bodies(control: Control) -> tuple[Any, Any]:
    given = await control.upload(jsonl([line(0)]), "in.jsonl", "batch")
    one = {"input_file_id": given, "endpoint": URL, "completion_window": "24h"}
    return one, one | {"metadata": {"a": "b"}}


async def begun(control: Control, rows: list[Any], endpoint: str = URL, **fields: Any) -> str:
    file_id = await control.upload(jsonl(rows), "in.jsonl", "batch")
    made = await control.sdk.batches.create(
        input_file_id=file_id,
        endpoint=endpoint,
        completion_window="24h",
        **fields,  # type: ignore[arg-type]
    )
    assert made.status == "validating" and made.expires_at == made.created_at + 86400
    return made.id


async def until(control: Control, batch_id: str, seen) -> Any:
    async with asyncio.timeout(60):
        while not seen(batch := await control.sdk.batches.retrieve(batch_id)):
            await asyncio.sleep(0.005)
    return batch


async def ended(control: Control, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        await control.context.tasks.idle("batches")
    return await control.sdk.batches.retrieve(batch_id)


async def content(control: Control, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (await control.sdk.files.content(file_id)).text.splitlines()]


async def test_batch_answers_every_line_once(control: Control):
    batch_id = await begun(control, [line(n) for n in range(10)], metadata={"night": "run"})
    batch = await ended(control, batch_id)
    assert batch.status == "completed" and batch.errors is None and batch.model == "starter"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (10, 10, 0)
    assert batch.metadata == {"night": "run"} and batch.error_file_id is None
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (30, 20, 50)
    rows = await content(control, batch.output_file_id)
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{n}" for n in range(10))
    for row in rows:
        assert row["error"] is None and row["response"]["status_code"] == 200
        number = row["custom_id"][1:]
        assert row["response"]["body"]["echo"]["messages"][0]["content"] == f"{number}+1?"
    assert 1 < control.engines.most_at_once <= control.engines.lines
    file = await control.sdk.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.filename == f"{batch_id}_output.jsonl"
    assert list(control.context.batches_dir.iterdir()) == []
    assert [b.id for b in (await control.sdk.batches.list()).data] == [batch_id]
    assert list(control.engines.models) == []


@pytest.mark.parametrize(
    ("rows", "code", "number"),
    [
        ([], "empty_file", None),
        ([line(0), "{nonsense"], "invalid_json_line", 2),
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([line(0), line(1, url="/v1/embeddings")], "mismatched_endpoint", 2),
        ([line(0, custom_id=7)], "invalid_type", 1),
        ([line(0), line(1, body={"model": "other", "messages": []})], "mismatched_model", 2),
        ([line(0, body={"messages": []})], "missing_required_parameter", 1),
        ([line(0, body={"model": "starter", "stream": True})], "unsupported_parameter", 1),
        ([line(0, body={"model": "unknown", "messages": []})], "model_not_found", 1),
        ([line(n) for n in range(51)], "too_many_requests", 51),
        ([line(0, body={"model": "starter", "messages": [], "user": DEEP})], "invalid_json_line", 1),
    ],
)
async def test_batch_with_bad_line_fails_with_line_number(control: Control, rows, code, number):
    change(control.context, config=control.context.config.model_copy(update={"batch_max_lines": 50}))
    batch = await ended(control, await begun(control, rows))
    assert batch.status == "failed" and batch.failed_at and batch.errors.object == "list"
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert control.engines.sent == [] and batch.output_file_id is None


async def test_batch_requests_use_key_of_batch_and_are_not_stored(control: Control):
    key_id = control.as_key("ann")
    rows = [line(0, url="/v1/responses", body={"model": "starter", "input": "x", "store": True})]
    assert (await ended(control, await begun(control, rows, "/v1/responses"))).status == "completed"
    assert control.engines.asked_by == [key_id]
    assert control.engines.sent == [{"model": "starter", "input": "x", "store": False}]


async def test_batch_writes_rejected_line_to_error_file(control: Control):
    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        if body["messages"][0]["content"] == "1+1?":
            return EngineAnswer(400, {"error": {"message": "no", "type": "invalid_request_error"}})
        return None

    control.engines.rule = rule
    batch = await ended(control, await begun(control, [line(n) for n in range(3)]))
    assert batch.status == "completed" and batch.request_counts.failed == 1
    (failed,) = await content(control, batch.error_file_id)
    assert failed["custom_id"] == "r1" and failed["response"]["status_code"] == 400
    assert len(await content(control, batch.output_file_id)) == 2


async def test_batch_without_engines_has_a_reason_to_wait(control: Control):
    control.engines.lines = 0
    batch_id = await begun(control, [line(n) for n in range(3)])
    batch = await until(control, batch_id, lambda b: b.waiting_for)
    assert batch.status == "in_progress"
    assert batch.waiting_for == "no engine of the model is awake" and control.engines.sent == []
    assert list(control.engines.models) == ["starter"]
    control.engines.lines = 2
    assert (await ended(control, batch_id)).request_counts.completed == 3
    assert control.engines.most_at_once <= 2


async def _hang_after(control: Control, answered: int) -> None:
    """Make engines answer the first `answered` lines and hang on all later lines."""
    done = 0

    async def rule(body: dict[str, Any]) -> EngineAnswer | None:
        nonlocal done
        done += 1
        if done > answered:
            await asyncio.Event().wait()
        return None

    control.engines.rule = rule


async def test_cancelled_batch_keeps_answers(control: Control):
    await _hang_after(control, 3)
    batch_id = await begun(control, [line(n) for n in range(8)])
    await until(control, batch_id, lambda b: b.request_counts.completed == 3)
    cancelled = await control.sdk.batches.cancel(batch_id)
    assert cancelled.status == "cancelling" and cancelled.cancelling_at
    batch = await ended(control, batch_id)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts.completed == 3
    assert len(await content(control, batch.output_file_id)) == 3
    assert (await control.sdk.batches.cancel(batch_id)).status == "cancelled"


async def test_expired_batch_lists_lines_not_run(control: Control):
    await _hang_after(control, 2)
    keep = {"anchor": "created_at", "seconds": 3600}
    batch_id = await begun(control, [line(n) for n in range(4)], output_expires_after=keep)
    await until(control, batch_id, lambda b: b.request_counts.completed == 2)
    BATCHES.update(control.db, batch_id, expires_s=time.time() - 1)
    control.context.tasks.restart("batches", batch_id)
    batch = await ended(control, batch_id)
    assert batch.status == "expired" and batch.expired_at
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    rows = await content(control, batch.error_file_id)
    assert {row["error"]["code"] for row in rows} == {"batch_expired"} and len(rows) == 2
    file = await control.sdk.files.retrieve(batch.output_file_id)
    assert file.expires_at == file.created_at + 3600


async def test_delete_of_input_file_in_use_is_rejected(control: Control):
    await _hang_after(control, 0)
    batch_id = await begun(control, [line(0)])
    batch = await control.sdk.batches.retrieve(batch_id)
    with pytest.raises(openai.ConflictError) as refused:
        await control.sdk.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use" and batch_id in refused.value.message
    await control.sdk.batches.cancel(batch_id)
    await ended(control, batch_id)
    assert (await control.sdk.files.delete(batch.input_file_id)).deleted


async def test_batch_after_restart_repeats_only_unanswered_lines(control: Control):
    await _hang_after(control, 5)
    batch_id = await begun(control, [line(n) for n in range(9)])
    await until(control, batch_id, lambda b: b.request_counts.completed == 5)
    # Build the state after SIGKILL: the row is in progress, and the last answer on disk is truncated.
    await control.context.tasks.stop()
    with open(control.context.batches_dir / f"{batch_id}.output.jsonl", "ab") as out:
        out.write(b'{"id":"batch_req_torn","custom_id":"r8","resp')
    control.engines.rule = None
    kept = (control.context.batches_dir / f"{batch_id}.output.jsonl").read_text().splitlines()[:5]
    answered_before = {json.loads(row)["custom_id"] for row in kept}
    sent_before = len(control.engines.sent)
    storage.sweep(control.context)
    control.context.tasks.resume()
    batch = await ended(control, batch_id)
    assert batch.status == "completed" and batch.request_counts.completed == 9
    assert (batch.usage.total_tokens, len(control.engines.sent) - sent_before) == (45, 4)
    rows = await content(control, batch.output_file_id)
    assert sorted(row["custom_id"] for row in rows) == [f"r{n}" for n in range(9)]
    assert {row["custom_id"] for row in rows[:5]} == answered_before


async def test_run_to_completion_cancelled_during_failing_write_raises_cancel():
    began, goes_on = threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        goes_on.wait()
        raise OSError

    task = asyncio.create_task(batches._run_to_completion(write))
    await asyncio.to_thread(began.wait)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task


def read(tmp_path: Path, data: bytes) -> Lines:
    (tmp_path / "input").write_bytes(data)
    return read_lines(tmp_path / "input", URL, max_lines=10, line_bytes=1000)


def test_read_of_endless_line_stops_at_limit(tmp_path):
    data = jsonl([line(1)]) + b"x" * (64 << 20)
    tracemalloc.start()
    try:
        lines = read(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert [(error["code"], error["line"]) for error in lines.errors] == [("line_too_long", 2)]


def test_read_lines_skips_byte_order_marks_and_blank_lines(tmp_path):
    mark, rows = b"\xef\xbb\xbf", [jsonl([line(number)]).rstrip() for number in (1, 2, 3)]
    data = mark + rows[0] + b"\r\n\r\n" + rows[1] + b"\r\n" + mark + rows[2]
    lines = read(tmp_path, data)
    assert not lines.errors
    parts = [data[offset : offset + size] for offset, size in lines.requests.values()]
    assert [json.loads(part)["custom_id"] for part in parts] == ["r1", "r2", "r3"]
    (error,) = read(tmp_path, jsonl([line(1)]).decode().encode("utf-16")).errors
    assert (error["code"], error["line"]) == ("invalid_json_line", 1) and "UTF-16" in error["message"]
