"""/v1/uploads, called by the OpenAI SDK: parts in any order form one file, and no temporary files remain."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.controller.files import storage
from appliance.store.rows import UPLOADS, UploadRow
from tests.unit.controller.conftest import Control, chat_lines

DATA = chat_lines()
PIECES = [DATA[:100], DATA[100:700], DATA[700:]]


async def bodies(control: Control) -> tuple[Any, Any]:
    one = {"filename": "f", "purpose": "batch", "bytes": 9, "mime_type": "text/plain"}
    return one, one | {"bytes": 8}


async def begun(control: Control, size: int = len(DATA), purpose: str = "fine-tune", **fields) -> str:
    made = await control.sdk.uploads.create(
        bytes=size, filename="train.jsonl", mime_type="text/jsonl", purpose=purpose, **fields
    )
    assert made.status == "pending" and made.file is None and made.expires_at - made.created_at == 3600
    return made.id


async def part(control: Control, upload_id: str, data: bytes) -> str:
    made = await control.sdk.uploads.parts.create(upload_id, data=data)
    assert made.upload_id == upload_id
    return made.id


def left(control: Control) -> list[str]:
    return [
        entry.name for folder in (control.context.uploads_dir, control.context.files_dir) for entry in folder.iterdir()
    ]


async def test_upload_parts_in_any_order_form_the_same_file(control: Control):
    upload_id = await begun(control)
    ids = {n: await part(control, upload_id, PIECES[n]) for n in (2, 0, 1)}
    unused = await part(control, upload_id, b"never named")
    done = await control.sdk.uploads.complete(
        upload_id, part_ids=[ids[0], ids[1], ids[2]], md5=hashlib.md5(DATA).hexdigest()
    )
    assert done.status == "completed" and done.file is not None and unused
    whole = await control.sdk.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
    assert done.file.model_dump(exclude={"id", "created_at"}) == whole.model_dump(exclude={"id", "created_at"})
    assert (await control.sdk.files.content(done.file.id)).content == DATA
    assert sorted(left(control)) == sorted([done.file.id, whole.id])
    # The SDK repeats a request if the answer is lost; the repetition returns the same file.
    again = await control.sdk.uploads.complete(upload_id, part_ids=[ids[0], ids[1], ids[2]])
    assert again.file is not None and again.file.id == done.file.id
    await control.job(training_file=done.file.id)


def test_join_opens_one_part_file_at_a_time(tmp_path: Path):
    """An upload may have more parts than a process may open files at once."""
    ids = [f"part_{number}" for number in range(100)]
    for part_id in ids:
        (tmp_path / part_id).write_bytes(b"x")
    row = UploadRow("upload_x", "f", "user_data", "text/plain", len(ids), 0.0, 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    try:
        storage._join(row, tmp_path, ids, tmp_path / ".joined")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_complete_with_wrong_parts_is_rejected_and_can_be_repeated(control: Control):
    upload_id = await begun(control)
    ids = [await part(control, upload_id, piece) for piece in PIECES]
    for wrong, code in (
        ({"part_ids": ids[:2]}, "upload_size_mismatch"),
        ({"part_ids": [*ids, ids[0]]}, "upload_size_mismatch"),
        ({"part_ids": [*ids, "part_x"]}, "part_not_found"),
        ({"part_ids": ids, "md5": "0" * 32}, "checksum_mismatch"),
        ({"part_ids": ids, "md5": "md5"}, "invalid_value"),
        ({"part_ids": [ids[1], ids[0], ids[2]], "md5": hashlib.md5(DATA).hexdigest()}, "checksum_mismatch"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await control.sdk.uploads.complete(upload_id, **wrong)
        assert refused.value.code == code
    assert left(control) == [upload_id]
    assert (await control.sdk.uploads.complete(upload_id, part_ids=ids)).status == "completed"


async def test_upload_limits_are_enforced(control: Control):
    with pytest.raises(openai.BadRequestError) as refused:
        await begun(control, size=control.context.config.upload_total_bytes + 1)
    assert refused.value.code == "upload_too_large"
    with pytest.raises(openai.BadRequestError) as refused:
        await begun(control, purpose="nonsense")
    assert refused.value.param == "purpose"
    upload_id = await begun(control, size=10)
    with pytest.raises(openai.APIStatusError) as large:
        await part(control, upload_id, b"x" * (control.context.config.upload_part_bytes + 100_000))
    assert large.value.status_code == 413
    for _ in range(2):  # twice, as if the answer to the first request was lost
        await part(control, upload_id, b"x" * 10)
    with pytest.raises(openai.BadRequestError):
        await part(control, upload_id, b"x")  # over 20 bytes: twice the announced size
    folder = control.context.uploads_dir / upload_id
    assert sum(entry.stat().st_size for entry in folder.iterdir()) == 20
    row = UPLOADS.find_visible(control.db, upload_id, viewer=None)
    assert row is not None and row.part_bytes == 20, "so that no part lists those before it"


async def test_cancelled_and_expired_uploads_leave_no_files(control: Control):
    cancelled, expired = await begun(control), await begun(control)
    for upload_id in (cancelled, expired):
        await part(control, upload_id, PIECES[0])
    assert (await control.sdk.uploads.cancel(cancelled)).status == "cancelled"
    assert (await control.sdk.uploads.cancel(cancelled)).status == "cancelled"
    storage.end_uploads(control.context, time.time() + 3601)
    assert left(control) == []
    row = UPLOADS.find_visible(control.db, expired, viewer=None)
    assert row is not None and row.status == "expired"
    for upload_id in (cancelled, expired):
        with pytest.raises(openai.BadRequestError) as refused:
            await part(control, upload_id, b"x")
        assert refused.value.code == "upload_not_pending"
    with pytest.raises(openai.NotFoundError):
        await control.sdk.uploads.cancel("upload_unknown")


async def test_upload_continues_after_a_restart(control: Control):
    upload_id = await begun(control)
    first = await part(control, upload_id, PIECES[0])
    folder = control.context.uploads_dir / upload_id
    (folder / ".incoming-part_torn").write_bytes(b"half")
    (control.context.uploads_dir / ".incoming-torn").write_bytes(b"half")
    storage.sweep(control.context)
    assert [entry.name for entry in folder.iterdir()] == [first] and left(control) == [upload_id]
    rest = [await part(control, upload_id, piece) for piece in PIECES[1:]]
    done = await control.sdk.uploads.complete(upload_id, part_ids=[first, *rest])
    assert done.file is not None and (await control.sdk.files.content(done.file.id)).content == DATA


async def test_complete_of_upload_completed_meanwhile_is_rejected(control: Control, monkeypatch):
    upload_id = await begun(control)
    ids = [await part(control, upload_id, piece) for piece in PIECES]

    def joined(*_):
        UPLOADS.update(control.db, upload_id, status="completed")  # as by a concurrent repetition
        raise FileNotFoundError(ids[0])

    monkeypatch.setattr(storage, "_join", joined)
    with pytest.raises(openai.BadRequestError) as refused:
        await control.sdk.uploads.complete(upload_id, part_ids=ids)
    assert refused.value.code == "upload_not_pending" and left(control) == [upload_id]
