"""/v1/files, called by the OpenAI SDK, and malformed uploads, which are rejected."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.controller.app import keep_house
from tests.unit.controller.conftest import Control, chat_lines

BOUNDARY = "xxBOUNDARYxx"


def form(*parts: bytes, end: bytes = b"--") -> bytes:
    body = b"".join(b"--" + BOUNDARY.encode() + b"\r\n" + part + b"\r\n" for part in parts)
    return body + b"--" + BOUNDARY.encode() + end + b"\r\n"


def file_part(filename: bytes = b"a.jsonl", data: bytes = b"x") -> bytes:
    return b'Content-Disposition: form-data; name="file"; filename="' + filename + b'"\r\n\r\n' + data


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value


PURPOSE = field(b"purpose", b"assistants")


async def post(control: Control, body: Any, content_type: str = f"multipart/form-data; boundary={BOUNDARY}"):
    return await control.http.post("/v1/files", content=body, headers={"content-type": content_type})


def left_on_disk(control: Control) -> list[str]:
    return [entry.name for entry in control.context.files_dir.iterdir()]


async def test_file_is_uploaded_downloaded_and_deleted(control: Control):
    data = chat_lines()
    made = await control.sdk.files.create(file=("train.jsonl", data), purpose="fine-tune")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "train.jsonl", "fine-tune")
    assert made.status == "processed"
    assert abs(made.created_at - time.time()) < 5 and made.expires_at is None
    stored = control.context.files_dir / made.id
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert (await control.sdk.files.retrieve(made.id)) == made
    content = await control.sdk.files.content(made.id)
    assert content.content == data
    assert content.response.headers["x-content-type-options"] == "nosniff"
    deleted = await control.sdk.files.delete(made.id)
    assert deleted.deleted and not stored.exists()
    with pytest.raises(openai.NotFoundError, match="No such File"):
        await control.sdk.files.retrieve(made.id)


async def test_delete_interrupted_halfway_can_be_repeated(control: Control, monkeypatch: pytest.MonkeyPatch):
    file_id = await control.upload(b"x", purpose="user_data")

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError("as if the process had died here")

    with monkeypatch.context() as dying:
        dying.setattr(Path, "unlink", unlink)
        assert (await control.http.delete(f"/v1/files/{file_id}")).status_code == 500
    assert (await control.http.delete(f"/v1/files/{file_id}")).status_code == 200
    assert left_on_disk(control) == []


async def test_file_expiry_is_stored_and_applied(control: Control):
    made = await control.sdk.files.create(
        file=("a", b"x"), purpose="assistants", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at - made.created_at == 3600
    batch = await control.sdk.files.create(file=("b", b"x"), purpose="batch")
    assert batch.expires_at - batch.created_at == 30 * 86400
    keep_house(control.context, time.time() + 3601)
    assert left_on_disk(control) == [batch.id]


def expiring(seconds: bytes, anchor: bytes = b"created_at") -> bytes:
    return form(
        file_part(), PURPOSE, field(b"expires_after[anchor]", anchor), field(b"expires_after[seconds]", seconds)
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (form(PURPOSE), "file", "missing_required_parameter"),
        (form(file_part()), "purpose", "missing_required_parameter"),
        (form(file_part(), field(b"purpose", b"search")), "purpose", "invalid_value"),
        (form(file_part(), file_part(), PURPOSE), None, "invalid_body"),
        (form(file_part(b"../../etc/x.jsonl"), PURPOSE), "file", "invalid_filename"),
        (form(file_part(b"esc\x1b[31m.jsonl"), PURPOSE), "file", "invalid_filename"),
        (form(file_part(b""), PURPOSE), "file", "invalid_filename"),
        (form(file_part(b"a" * 5000), PURPOSE), None, "invalid_body"),
        (form(PURPOSE, file_part(data=b"x" * 100))[:-60], "file", "missing_required_parameter"),
        (expiring(b"3599"), "expires_after[seconds]", "invalid_value"),
        # Its first twenty digits are 3600, but the whole number is too large for an integer.
        (expiring(b"0" * 16 + b"3600" + b"9" * 400), "expires_after[seconds]", "invalid_value"),
    ],
)
async def test_malformed_upload_form_is_rejected_without_leftovers(
    control: Control, body: bytes, param: str, code: str
):
    answer = await post(control, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), answer.text
    assert left_on_disk(control) == []
