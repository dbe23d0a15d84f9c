"""Lists without pages: made some rows at a time, one after the other."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from appliance.controller.http.paging import LongLists

from .conftest import ADMIN, Control


async def test_the_loop_is_free_as_long_as_the_rows_took(monkeypatch: pytest.MonkeyPatch):
    """The newest thousand hand-overs held it for 0.5 s, whoever has `read` asked for them."""
    now_s, slept, inside = 0.0, list[float](), 0

    async def sleep(for_s: float) -> None:
        slept.append(round(for_s, 3))
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0)

    def view(number: int) -> dict[str, Any]:
        nonlocal now_s, inside
        inside += 1
        now_s += 0.004
        return {"id": number}

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    lists = LongLists()
    answers = await asyncio.gather(*(lists.answer(range(7), view) for _ in range(2)))
    assert [json.loads(bytes(answer.body)) for answer in answers] == [
        {"object": "list", "data": [{"id": number} for number in range(7)]}
    ] * 2
    assert slept == [0.012] * 4, "after three rows each, of one list after the other"


@pytest.mark.parametrize("path", ["/admin/v1/handovers?limit=1000", "/admin/v1/models"])
async def test_they_are_asked_for_so(control: Control, monkeypatch: pytest.MonkeyPatch, path: str):
    asked: list[str] = []
    answer = LongLists.answer

    async def seen(self: LongLists, rows: Any, view: Any) -> Any:
        asked.append(path)
        return await answer(self, rows, view)

    monkeypatch.setattr(LongLists, "answer", seen)
    told = await control.http.get(path, headers=ADMIN)
    assert told.status_code == 200 and told.json()["object"] == "list" and asked == [path]
