"""Checks and preparations of files that the box has."""

import asyncio
import json
import signal
from typing import Any

import pytest

from appliance.controller import data_checks
from tests.unit.controller.conftest import Control


def lines(*pairs: tuple[str, str]) -> bytes:
    chats = ({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs)
    return b"".join(json.dumps(chat).encode() + b"\n" for chat in chats)


TWICE = lines(("Who is it?", "It is ann@example.org"), ("Who is it?", "It is ann@example.org"), ("And now?", "Nobody"))


async def asked(control: Control, path: str, body: dict | None = None) -> dict:
    answer = await control.http.request("GET" if body is None else "POST", path, json=body)
    answer.raise_for_status()
    return answer.json()


@pytest.fixture
def checks(control: Control, monkeypatch: pytest.MonkeyPatch) -> data_checks.DataWork:
    """Uploads are checked."""
    monkeypatch.setattr(data_checks, "AT_ONCE", 1)
    return data_checks.DataWork(control.context)


async def test_every_upload_of_training_data_is_checked_after_it(control: Control, checks: data_checks.DataWork):
    made = await control.upload(TWICE)
    shown = await asked(control, f"/v1/files/{made}")
    assert shown["check"] == {"status": "waiting"}
    assert (await control.http.get(f"/v1/files/{made}/check")).status_code == 409
    await control.context.tasks.idle("data_checks")
    shown = await asked(control, f"/v1/files/{made}")
    assert shown["check"] == {"status": "done", "found": {"duplicates": 1, "personal_data": 2}}
    report = await asked(control, f"/v1/files/{made}/check")
    assert report["file"]["file"] == made and report["checks"]["duplicates"]["first"] == [{"line": 2, "of": 1}]
    (listed,) = (await control.sdk.files.list()).data
    assert listed.check == {"status": "done"}, "a list reads no reports"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("checked_here")
async def test_a_check_that_is_asked_for_replaces_the_report(control: Control):
    made, valid = await control.upload(TWICE), await control.upload(lines(("And now?", "Nobody")))
    report = await asked(control, f"/v1/files/{made}/check", {"against": valid, "max_tokens": 5})
    assert report["checks"]["contaminated"]["count"] == 1
    assert await asked(control, f"/v1/files/{made}/check") == report


def began(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """Processes of checks from now on, which do not end by themselves."""
    begun: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*_: str, **more: Any) -> asyncio.subprocess.Process:
        begun.append(await start("sleep", "600", **more))
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return begun


async def test_a_check_that_nobody_waits_for_ends(control: Control, monkeypatch: pytest.MonkeyPatch):
    begun = began(monkeypatch)
    waiting = asyncio.create_task(data_checks.DataWork(control.context).run("ann", "file-1", {}))
    while not begun:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert begun[0].returncode == -signal.SIGKILL
