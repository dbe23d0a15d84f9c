"""A process that lives and does not answer is killed, one that answers or is given back in time is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.boot import liveness
from appliance.boot.liveness import HUNG_S, Pulse


class Process:
    name, pid, restarted = "controller", 7, 0

    def restart(self) -> None:
        self.restarted += 1
        self.pid = self.pid + 1


async def test_only_a_long_silence_kills(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(liveness, "PATIENCE_S", 0.01)
    now_s, said, process = 0.0, [], Process()
    asked = Pulse(process, "http://box", "/", str(tmp_path / "s"), said.append, lambda: now_s)
    await asked.look()  # its life begins to count here
    now_s += HUNG_S - 1
    await asked.look()

    async def refuses(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    monkeypatch.setattr(liveness, "PATIENCE_S", 5)
    server = await asyncio.start_unix_server(refuses, tmp_path / "s")
    await asked.look()  # a refusal is an answer
    server.close()
    await server.wait_closed()
    now_s += HUNG_S - 1
    await asked.look()
    assert process.restarted == 0 and said == []
    now_s += 1
    await asked.look()
    assert process.restarted == 1
    assert said == ["the controller lives and has not answered for 120 s: it is restarted"]
    now_s += HUNG_S + 1
    await asked.look()  # the new one has all of its time
    process.pid = None
    now_s += HUNG_S + 1
    await asked.look()  # and one that is being started is its keeper's
    assert process.restarted == 1


async def test_one_that_starts_slowly_gets_twice_the_time_of_the_last(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(liveness, "PATIENCE_S", 0.01)
    now_s, said, process = 0.0, [], Process()
    asked = Pulse(process, "http://box", "/", str(tmp_path / "s"), said.append, lambda: now_s)
    waited = []
    for _ in range(6):
        began_s, before = now_s, process.restarted
        while process.restarted == before:
            await asked.look()
            now_s += HUNG_S / 2
        waited.append((now_s - began_s) // HUNG_S)
    assert waited == [1, 2, 4, 8, 8, 8], "a start that takes ten minutes comes to its end"

    async def answers():
        return True

    monkeypatch.setattr(asked, "_answers", answers)
    await asked.look()
    await asked.look()
    assert asked._hung_s == HUNG_S, "whoever answers has proved that the time is enough"
