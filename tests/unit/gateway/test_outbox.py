"""appliance/gateway/http/outbox.py: what one turn of the loop writes goes out at its end, in order and in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from appliance.gateway.http import outbox
from appliance.gateway.http.outbox import Outbox, Writer


class Transport:
    def __init__(self, log: list[tuple[str, str, bytes]], name: str) -> None:
        self.log, self.name = log, name

    def write(self, data: bytes) -> None:
        self.log.append((self.name, "write", data))

    def close(self) -> None:
        self.log.append((self.name, "close", b""))

    def abort(self) -> None:
        self.log.append((self.name, "abort", b""))


@pytest.fixture
def log() -> Iterator[list[tuple[str, str, bytes]]]:
    yield []


def writer(box: Outbox, log: list[tuple[str, str, bytes]], name: str) -> Writer:
    made = Writer(box)
    made.transport = Transport(log, name)  # type: ignore[assignment]
    return made


def test_a_turn_is_sent_at_its_end(log: list[tuple[str, str, bytes]]) -> None:
    async def turn() -> None:
        box = Outbox()
        first, second = writer(box, log, "a"), writer(box, log, "b")
        first.write(b"1")
        second.write(b"2")
        first.write(b"3")
        assert log == []
        await asyncio.sleep(0)
        assert log == [("a", "write", b"13"), ("b", "write", b"2")]
        first.write(b"4")
        await asyncio.sleep(0)
        assert log[2:] == [("a", "write", b"4")]

    asyncio.run(turn())


def test_nothing_is_lost_or_late_at_an_end(log: list[tuple[str, str, bytes]]) -> None:
    async def turn() -> None:
        box = Outbox()
        closing, dying = writer(box, log, "a"), writer(box, log, "b")
        closing.write(b"last words")
        closing.close()
        dying.write(b"half")
        dying.abort()
        await asyncio.sleep(0)
        assert log == [("a", "write", b"last words"), ("a", "close", b""), ("b", "abort", b"")]

    asyncio.run(turn())


def test_it_rests_where_events_come_one_by_one(
    log: list[tuple[str, str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what was written, not in front of it; and only where the last one was a moment ago."""
    now_s = 1.0
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(outbox.time, "sleep", lambda s: log.append(("", "rest", b"")))

    async def turns() -> None:
        nonlocal now_s
        box = Outbox()
        one = writer(box, log, "a")
        for data, later_s in ((b"1", 10.0), (b"2", outbox._REST_S), (b"3", outbox._REST_S * 3)):
            now_s += later_s
            one.write_event(data)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        one.write(b"an end")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(turns())
    assert [what if what == "rest" else data for _, what, data in log] == [b"1", b"2", "rest", b"3", b"an end"]


def test_much_goes_out_in_the_turn_itself(log: list[tuple[str, str, bytes]]) -> None:
    """Large pieces at once, behind what was written before; and many writers do not wait for the last of them."""

    async def turn() -> None:
        box = Outbox()
        large = b"x" * outbox._LARGE_BYTES
        one = writer(box, log, "a")
        one.write(b"head ")
        one.write(large)
        one.write(b"tail")
        assert log == [("a", "write", b"head " + large)]
        others = [writer(box, log, str(i)) for i in range(outbox._AT_ONCE)]
        for other in others:
            other.write(b"y")
        assert ("a", "write", b"tail") in log and len(log) >= outbox._AT_ONCE
        await asyncio.sleep(0)
        assert len(log) == 2 + len(others)

    asyncio.run(turn())
