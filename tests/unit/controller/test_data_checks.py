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


@pytest.mark.usefixtures("checked_here")
async def test_check_answers_with_its_report_and_keeps_it(control: Control):
    made, valid = await control.upload(TWICE), await control.upload(lines(("And now?", "Nobody")))
    assert (await control.http.get(f"/v1/files/{made}/check")).status_code == 409
    report = await asked(control, f"/v1/files/{made}/check", {"against": valid, "max_tokens": 5})
    assert report["checks"]["contaminated"]["count"] == 1
    assert report["checks"]["duplicates"]["first"] == [{"line": 2, "of": 1}]
    assert await asked(control, f"/v1/files/{made}/check") == report
    assert (await asked(control, f"/v1/files/{made}"))["check"]["found"]["duplicates"] == 1


def began(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """Processes of checks from now on, which do not end by themselves."""
    begun: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: str, **more: Any) -> asyncio.subprocess.Process:
        begun.append(await start(*command, **more))
        return begun[-1]

    monkeypatch.setattr(data_checks, "command_of", lambda request: ["sleep", "600"])
    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return begun


async def test_a_check_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch):
    begun = began(monkeypatch)
    waiting = asyncio.create_task(data_checks.carried_out({}))
    while not begun:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert begun[0].returncode == -signal.SIGKILL
