"""Checks and preparations of files that the box has."""

import json

import pytest

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
async def test_check_answers_with_its_report(control: Control):
    made, valid = await control.upload(TWICE), await control.upload(lines(("And now?", "Nobody")))
    report = await asked(control, f"/v1/files/{made}/check", {"against": valid, "max_tokens": 5})
    assert report["checks"]["contaminated"]["count"] == 1
    assert report["checks"]["duplicates"]["first"] == [{"line": 2, "of": 1}]
