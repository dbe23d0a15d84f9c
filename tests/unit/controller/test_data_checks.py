"""Checks of training data on the box: reports on stored files, and validation of jobs."""

import json
from pathlib import Path

import pytest

from appliance.controller.jobs import settings
from appliance.store import jobs
from tests.unit.controller.conftest import Control
from weights.format.errors import IntegrityError


def lines(*pairs: tuple[str, str]) -> bytes:
    chats = ({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs)
    return b"".join(json.dumps(chat).encode() + b"\n" for chat in chats)


TWICE = lines(("Who is it?", "It is ann@example.org"), ("Who is it?", "It is ann@example.org"), ("And now?", "Nobody"))


async def asked(control: Control, path: str, body: dict | None = None) -> dict:
    answer = await control.http.request("GET" if body is None else "POST", path, json=body)
    answer.raise_for_status()
    return answer.json()


@pytest.mark.usefixtures("checked_here")
async def test_check_returns_report(control: Control):
    made, valid = await control.upload(TWICE), await control.upload(lines(("And now?", "Nobody")))
    report = await asked(control, f"/v1/files/{made}/check", {"against": valid, "max_tokens": 5})
    assert report["checks"]["contaminated"]["count"] == 1
    assert report["checks"]["duplicates"]["first"] == [{"line": 2, "of": 1}]


@pytest.mark.usefixtures("checked_here")
async def test_validation_of_job_with_damaged_base_succeeds(control: Control, monkeypatch: pytest.MonkeyPatch):
    def damaged(name: object) -> None:
        raise IntegrityError("other bytes", path=name)

    monkeypatch.setattr(control.context.tiers, "bring_in", damaged)
    assert jobs.get(control.db, await control.job()).phase == "queued"


@pytest.mark.usefixtures("checked_here")
async def test_check_with_unusable_tokenizer_names_model(
    control: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(settings, "tokenizer_of", lambda *_: tmp_path)
    made = await control.upload(TWICE)
    answer = await control.http.post(f"/v1/files/{made}/check", json={"model": "starter"})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", "invalid_value")
