"""Pipelines whose data is in a bucket: what is new, what was changed, a store that is away, and who may name one. The
store is an S3 server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from appliance.controller.access.disk import insufficient_storage
from appliance.controller.interfaces.config import Bucket
from appliance.controller.jobs.events import JobEvents
from appliance.controller.pipelines import bucket, new_data
from appliance.controller.pipelines import runner as pipeline_runner
from appliance.store.objects import jobs, pipelines
from tests.unit.controller.conftest import ADMIN, Control, chat_lines
from tests.unit.controller.test_pipelines import (  # noqa: F401 - fixtures
    TRAIN,
    administrator,
    begun,
    events,
    post,
    put,
    rounds,
    says,
    train,
)
from weights.tiers.locations import s3_at
from weights.tiers.objects_s3 import S3Objects

DATA = {"bucket": "chats", "pattern": "*.jsonl"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def settings(server: str, control: Control, tmp_path: Path) -> Bucket:
    """Of the bucket that the box knows as chats."""
    credentials = tmp_path / "credentials"
    credentials.write_text("[box]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = secret\n")
    made = Bucket(url="s3://fraud/days", endpoint=server, credentials_file=str(credentials), credentials_profile="box")
    given(control, made)
    return made


@pytest.fixture
def store(settings: Bucket) -> Iterator[S3Objects]:
    objects = s3_at(settings)
    objects._client.create_bucket(Bucket="fraud")
    yield objects
    for key, *_ in list(objects.tagged()):
        objects.delete(key)


def given(control: Control, made: Bucket | None) -> None:
    buckets = {} if made is None else {"chats": made}
    control.context.config = control.context.config.model_copy(update={"buckets": buckets})


def lines_of(control: Control, job_id: str | None) -> list[bytes]:
    file_id = jobs.get(control.db, job_id or "").training_file
    return (control.context.files_dir / file_id).read_bytes().splitlines()


async def test_what_is_new_in_a_bucket_is_trained_on_once(control: Control, events: JobEvents, store: S3Objects):  # noqa: F811
    await put(control, data=DATA, schedule={"on_new_data": True})
    await post(control, "pipelines/nightly/schedule", {"on": True})
    row = pipelines.find(control.db, "nightly")
    assert row is not None

    async def looked() -> str | None:
        """The run that a look at the bucket has begun."""
        pipelines.update(control.db, row.id, next_s=0.0)
        await control.app.state.pipelines.look()
        await control.app.state.pipelines.tasks.idle()
        going = pipelines.running_of(control.db, row.id)
        return None if going is None else going.id

    assert await looked() is None
    store.put("monday/b.jsonl", chat_lines(12))
    store.put("a.jsonl", chat_lines(3).rstrip(b"\n"))
    store.put("notes.txt", b"no data")
    store.put("empty.jsonl", b"")
    run = await rounds(control, await looked() or "")
    assert run.trigger == "data" and says(run, "data").startswith("2 files")
    assert list(pipelines.chosen(control.db, run.id)) == ["s3://fraud/days/a.jsonl", "s3://fraud/days/monday/b.jsonl"]
    assert len(lines_of(control, run.job_id)) == 15
    train(control, events, run.job_id or "")
    assert (await rounds(control, run.id)).outcome == "answers" and await looked() is None
    store.put("a.jsonl", chat_lines(3).rstrip(b"\n"))
    assert await looked() is None, "the same bytes once more are not new"
    store.put("a.jsonl", chat_lines(11))
    run = await rounds(control, await looked() or "")
    assert list(pipelines.chosen(control.db, run.id)) == ["s3://fraud/days/a.jsonl"]
    assert len(lines_of(control, run.job_id)) == 11


async def test_a_run_waits_for_a_store_that_is_away_and_then_goes_on(
    control: Control, store: S3Objects, settings: Bucket, monkeypatch: pytest.MonkeyPatch
):
    now = [1000.0]
    monkeypatch.setattr(pipeline_runner.time, "monotonic", lambda: now[0])
    store.put("a.jsonl", chat_lines())
    await put(control, data=DATA)
    given(control, settings.model_copy(update={"endpoint": "http://127.0.0.1:9"}))
    run = await rounds(control, await begun(control), 2)
    assert run.state == "running" and "cannot be used" in says(run, "data") and "tried again" in says(run, "data")
    given(control, settings)
    assert not (await rounds(control, run.id, 2)).data_files, "it is not asked every second"
    now[0] += pipeline_runner.AGAIN_S
    run = await rounds(control, run.id, 3)
    assert run.job_id is not None and says(run, "data").startswith("1 file")
    await post(control, f"pipeline_runs/{run.id}/cancel")
    # Longer than that is a mistake.
    given(control, settings.model_copy(update={"url": "s3://no-such-bucket"}))
    run = await rounds(control, await begun(control), 2)
    pipelines.update_run(control.db, run.id, created_s=run.created_s - pipeline_runner.LONGEST_S)
    now[0] += pipeline_runner.AGAIN_S
    run = await rounds(control, run.id, 2)
    assert run.state == "failed" and "NoSuchBucket" in run.reason and "secret" not in run.reason
    given(control, None)
    run = await rounds(control, await begun(control), 2)
    assert run.state == "failed" and "no bucket chats any more" in run.reason


async def test_what_is_changed_between_two_steps_is_chosen_anew(
    control: Control, store: S3Objects, monkeypatch: pytest.MonkeyPatch
):
    """Also by a controller that has chosen, and was killed while it read."""
    store.put("a.jsonl", chat_lines(12))
    await put(control, data=DATA)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "write_lines", lambda *_: (_ for _ in ()).throw(KeyError("killed")))
        run = await rounds(control, await begun(control), 1)
    assert run.data_files == 1 and run.file_id is None and list(control.context.files_dir.iterdir()) == []
    store.put("a.jsonl", chat_lines(14))
    store.put("b.jsonl", chat_lines(10))
    run = await rounds(control, run.id, 1)
    assert run.state == "running" and run.data_files == 0 and "changed or deleted since" in says(run, "data")
    monkeypatch.setattr(pipeline_runner, "AGAIN_S", 0.0)
    control.app.state.pipelines._not_before_s.clear()
    run = await rounds(control, run.id, 3)
    assert run.data_files == 2 and len(lines_of(control, run.job_id)) == 24


async def test_of_an_object_no_more_is_written_than_its_owner_was_counted_for(
    control: Control, store: S3Objects, monkeypatch: pytest.MonkeyPatch
):
    """A store that sent an object without end filled the disk."""
    sent = 0

    def blocks(self: S3Objects, key: str, tag: str) -> Iterator[bytes]:
        nonlocal sent
        while sent < 1000:
            sent += 1
            yield chat_lines(12)

    monkeypatch.setattr(S3Objects, "blocks", blocks)
    store.put("a.jsonl", chat_lines(12))
    await put(control, data=DATA)
    run = await rounds(control, await begun(control), 1)
    assert sent == 2 and "more bytes than the bucket's list says" in says(run, "data")
    assert run.file_id is None and list(control.context.files_dir.iterdir()) == []


async def test_while_an_object_is_read_the_disk_keeps_its_floor(
    control: Control, store: S3Objects, monkeypatch: pytest.MonkeyPatch
):
    """What was free when it began may be another's by then."""
    monkeypatch.setattr(new_data, "_ROOM_EVERY", 1)
    asked = 0

    def check(more_bytes: int = 0) -> None:
        nonlocal asked
        asked += not more_bytes
        if asked > 1:
            raise insufficient_storage("The disk of the box has 0 bytes left above what it keeps free for itself")

    monkeypatch.setattr(control.context.quotas.disk, "check", check)
    store.put("a.jsonl", chat_lines(12))
    store.put("b.jsonl", chat_lines(12))
    await put(control, data=DATA)
    run = await rounds(control, await begun(control), 1)
    assert asked >= 2 and "The disk of the box" in (says(run, "data") + (run.reason or ""))
    assert run.file_id is None and list(control.context.files_dir.iterdir()) == []


async def test_a_run_that_is_cancelled_reads_no_further(
    control: Control, store: S3Objects, monkeypatch: pytest.MonkeyPatch
):
    read, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def blocks(self: S3Objects, key: str, tag: str) -> Iterator[bytes]:
        try:
            yield b"one"
            read.set()
            go_on.wait(60)
            yield b"two"
            raise AssertionError("it was asked for more")
        finally:
            ended.set()

    monkeypatch.setattr(S3Objects, "blocks", blocks)
    store.put("a.jsonl", chat_lines())
    await put(control, data=DATA)
    run_id = await begun(control)
    await control.app.state.pipelines.look()
    assert await asyncio.to_thread(read.wait, 10)
    await post(control, f"pipeline_runs/{run_id}/cancel")
    await control.app.state.pipelines.tasks.idle()
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    run = await rounds(control, run_id, 1)
    assert run.state == "cancelled" and list(control.context.files_dir.iterdir()) == []


async def test_only_buckets_of_the_configuration_are_read_and_for_administrators_only(
    control: Control, settings: Bucket
):
    async def refused(headers: Any, data: dict[str, Any], status: int) -> str:
        spec = {"name": "nightly", "train": TRAIN, "data": data}
        return str((await post(control, "pipelines", {"spec": spec}, status, headers))["error"]["message"])

    assert "admin" in await refused(dict(control.http.headers), DATA, 403)
    assert "it has chats" in await refused(ADMIN, {"bucket": "s3://fraud/days"}, 400)
    assert "one of" in await refused(ADMIN, DATA | {"folder": "/srv"}, 400)
