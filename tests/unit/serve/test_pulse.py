"""What a supervisor says of an engine that starts, and of one that does not."""

from __future__ import annotations

import asyncio

import pytest

from serve.core import errors
from serve.core.config import EngineConfig
from serve.core.errors import EngineRefused, EngineStartFailed
from serve.engine import replica
from tests.unit.serve.specs import spec


class Process:
    """The process of an engine: its first event is `said`, or the test's end of it where that is not yet set."""

    pid, name, alive, fatal, starved, log_path = 1 << 22, "engine r", True, None, False, "/nowhere"

    def __init__(self) -> None:
        self.said, self.killed = asyncio.Future(), asyncio.Event()

    async def next_event(self):
        return await self.said

    async def closed(self):
        await self.killed.wait()

    async def kill_and_wait(self):
        self.alive = False
        self.killed.set()

    async def how_it_ended(self):
        return "was ended by SIGSEGV"

    def log_end(self):
        return "\n".join(f"line {n}" for n in range(9))


@pytest.fixture
async def process(monkeypatch):
    made = Process()

    async def spawn(*_, **__):
        return made

    monkeypatch.setattr(replica.Child, "spawn", spawn)
    monkeypatch.setattr(replica, "group_dies_as", lambda *_: None)
    monkeypatch.setattr(replica, "_remove_leftovers", lambda spec: None)
    return made


@pytest.fixture
def supervisor(process, tmp_path):
    return replica.Replica("/w", str(tmp_path), EngineConfig())


async def test_an_engine_that_starts_is_seen_at_once_and_asked_nothing(process, supervisor):
    starting = asyncio.create_task(supervisor.start(spec()))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        status = await supervisor.status()
    assert (status["state"], status["model"], status["devices"], status["pid"]) == ("starting", "m", [3], process.pid)
    process.said.set_result(None)
    with pytest.raises(EngineStartFailed):
        await starting
    assert (await supervisor.status())["state"] == "dead"


async def refusal(process, supervisor, kinds=(), message=""):
    """The error of a start at which the process raises this, or ends without a word."""
    event = {"event": "fatal", "type": kinds[0], "kinds": list(kinds), "message": message} if kinds else None
    process.said.set_result(event)
    with pytest.raises(EngineStartFailed) as failed:
        await supervisor.start(spec())
    return failed.value


async def test_start_of_a_process_that_crashed_says_how_and_what_it_logged_last(process, supervisor):
    first, _, rest = str(await refusal(process, supervisor)).partition("\n")
    assert "its process was ended by SIGSEGV" in first and rest.endswith("line 8")


@pytest.mark.parametrize(
    ("kind", "message", "refused"),
    [
        (errors.EngineStartFailed, "its core was ended by SIGILL", True),
        (errors.CoreKilled, "its core was ended by SIGKILL", False),
        (ValueError, "Unknown quantization method: mxfp5", True),
        (RuntimeError, "Engine core initialization failed", True),
        (FileNotFoundError, "/dev/shm/x", False),
        (OSError, "[Errno 28] No space left on device", False),
        (RuntimeError, "CUDA error: uncorrectable ECC error encountered", False),
    ],
)
async def test_only_what_an_engine_says_of_itself_is_said_of_its_settings(process, supervisor, kind, message, refused):
    error = await refusal(process, supervisor, [one.__name__ for one in kind.__mro__], message)
    assert isinstance(error, EngineRefused) == refused
