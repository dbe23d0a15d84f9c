from __future__ import annotations

import asyncio
from typing import Any

from train.control.group import Group

EVENTS = (
    {"number": 1, "event": "ready", "step": 0, "seconds": {"join": 0.1, "prepare": 0.1}},
    {"number": 2, "event": "done", "step": 3, "outcome": "succeeded"},
)


class DoneHost:
    """The host of a rank that has come to its end."""

    killed = False

    async def start(self, *_: Any) -> dict[str, Any]:
        return {}

    async def call(self, method: str, timeout_s: float | None = None, **_: Any) -> Any:
        return {"phase": "done", "in_phase_s": 0.0, "step": 3}

    async def next_event(self, after: int = 0) -> dict[str, Any] | None:
        return EVENTS[after] if after < len(EVENTS) else None

    async def kill(self) -> None:
        self.killed = True


async def test_group_ends_when_its_ranks_are_done():
    host, told = DoneHost(), []
    group = Group(told.append)
    await group.adopt("job", [host])
    async with asyncio.timeout(10):
        outcome = await group.wait()
    assert (outcome.outcome, outcome.step, host.killed) == ("succeeded", 3, True)
    assert [event["event"] for event in told] == ["finished"]
