"""An engine that gives no sign of life is avoided, then ended."""

from __future__ import annotations

import asyncio

import pytest

from runtime.errors import ChildDied, ChildTimeout
from serve.core import errors
from serve.core.config import EngineConfig
from serve.core.errors import EngineRefused, EngineStartFailed
from serve.core.spec import ReplicaSpec
from serve.engine import replica


class StuckChild:
    """A process whose core answers nothing."""

    pid, name, alive, fatal, starved, log_path = 1 << 22, "engine r", True, None, False, "/nowhere"

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def next_event(self):
        return {"event": "ready", "seconds": {}, "fingerprint": {}, "address": "/r1.sock"}

    async def call(self, method, timeout_s=None, **_):
        try:
            async with asyncio.timeout(timeout_s):
                await self.killed.wait()
        except TimeoutError:
            raise ChildTimeout(method) from None
        raise ChildDied(self.name, self.pid, "/log", "", False)

    def kill(self):
        self.alive = False
        self.killed.set()

    async def closed(self):
        await self.killed.wait()

    async def kill_and_wait(self):
        self.kill()

    async def how_it_ended(self):
        return "was ended by SIGSEGV"

    def log_end(self):
        return "\n".join(f"line {n}" for n in range(9))


async def test_an_engine_that_starts_is_seen_at_once_and_asked_nothing(monkeypatch, tmp_path):
    """A look at the whole box waited for a minute's compiling, with all decisions about other models."""
    child = StuckChild()

    async def spawn(*_, **__):
        return child

    async def compiles():
        await child.killed.wait()
        return None

    child.next_event = compiles
    monkeypatch.setattr(replica.Child, "spawn", spawn)
    monkeypatch.setattr(replica, "group_dies_as", lambda *_: None)
    monkeypatch.setattr(replica, "_remove_leftovers", lambda spec: None)
    supervisor = replica.Replica("/w", str(tmp_path), EngineConfig())
    starting = asyncio.create_task(
        supervisor.start(ReplicaSpec("r", "m", "v1", "/v", "/s", (3,), "cpu", "/shm", 1 << 30))
    )
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        status = await supervisor.status()
    assert (status["state"], status["model"], status["devices"], status["pid"]) == ("starting", "m", [3], child.pid)
    child.kill()
    with pytest.raises(EngineStartFailed):
        await starting
    assert (await supervisor.status())["state"] == "dead"


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """Returns the error of a start at which the engine's process says this, or ends without a word."""

    async def start(event):
        child = StuckChild()

        async def next_event():
            return event

        async def spawn(*_, **__):
            return child

        child.next_event = next_event
        monkeypatch.setattr(replica.Child, "spawn", spawn)
        monkeypatch.setattr(replica, "group_dies_as", lambda *_: None)
        monkeypatch.setattr(replica, "_remove_leftovers", lambda spec: None)
        spec = ReplicaSpec("r", "m", "v1", "/v", "/s", (0,), "cpu", str(tmp_path), 1 << 30)
        with pytest.raises(EngineStartFailed) as failed:
            await replica.Replica("/w", str(tmp_path), EngineConfig()).start(spec)
        return failed.value

    return start


async def test_start_of_a_process_that_crashed_says_how_and_what_it_logged_last(refusal):
    first, _, rest = str(await refusal(None)).partition("\n")
    assert "its process was ended by SIGSEGV" in first and rest.endswith("line 8")


@pytest.mark.parametrize(("kind", "refused"), [("CoreDied", True), ("CoreKilled", False)])
async def test_start_whose_core_was_killed_says_nothing_of_its_settings(refusal, kind, refused):
    kinds = [each.__name__ for each in getattr(errors, kind).__mro__]
    error = await refusal({"event": "fatal", "type": kind, "kinds": kinds, "message": "its core was ended by SIGILL"})
    assert isinstance(error, EngineRefused) is refused
    assert "start: its core was ended by SIGILL; " in str(error)


@pytest.mark.parametrize(
    ("kind", "message", "refused"),
    [
        (ValueError, "Unknown quantization method: mxfp5", True),
        (RuntimeError, "Engine core initialization failed", True),
        (FileNotFoundError, "/dev/shm/x", False),
        (OSError, "[Errno 28] No space left on device", False),
        (RuntimeError, "CUDA error: uncorrectable ECC error encountered", False),
        (None, "", False),
    ],
)
async def test_only_what_an_engine_says_of_itself_is_said_of_its_settings(refusal, kind, message, refused):
    """Where the host's disk was full, or a start was killed, a model's settings were taken back."""
    kinds = [one.__name__ for one in kind.__mro__] if kind else []
    error = await refusal({"event": "fatal", "type": kinds[0], "kinds": kinds, "message": message} if kind else None)
    assert isinstance(error, EngineRefused) == refused
