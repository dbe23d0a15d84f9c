"""An engine that hangs is told from one that computes for long, and is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from runtime.errors import ChildDied
from runtime.processes.kernel import Vitals, group_vitals
from serve.core import errors
from serve.core.config import EngineConfig
from serve.core.errors import EngineRefused, EngineStartFailed
from serve.core.spec import ReplicaSpec
from serve.engine import pulse, replica
from serve.engine.pulse import EVERY_S, SILENT_S, Pulse, Silence

MINUTE = int(60 / EVERY_S)  # in looks


def silence() -> Silence:
    return Silence(Vitals(0.0), idle_limit_s=60.0, busy_limit_s=900.0)


def test_new_requests_avoid_an_engine_within_ten_seconds_of_its_stop():
    """It may stop just after a sign of life, and fall silent just before a look."""
    assert EVERY_S + SILENT_S + EVERY_S <= 10.0
    stopped, looks = silence(), 0
    while stopped.total_s < SILENT_S:
        assert stopped.look(Vitals(0.0, stopped=True), EVERY_S) is None
        looks += 1
    assert looks * EVERY_S < SILENT_S + EVERY_S


def test_processes_that_do_nothing_hang_after_a_minute():
    waiting = silence()
    looks = [waiting.look(Vitals(0.001 * n), EVERY_S) for n in range(1, MINUTE + 1)]
    assert looks[:-1] == [None] * (MINUTE - 1) and "do nothing" in looks[-1]


def test_one_long_step_is_no_hang_but_spinning_for_ever_is():
    computing = silence()
    looks = [computing.look(Vitals(4.0 * n), EVERY_S) for n in range(1, 15 * MINUTE + 1)]
    assert looks[:-1] == [None] * (15 * MINUTE - 1), "a prefill of a quarter of an hour"
    assert "processes run" in looks[-1]


def test_who_waits_for_a_processor_or_a_disk_does_not_hang():
    starved = silence()
    assert {starved.look(Vitals(0.0, waits=True), EVERY_S) for _ in range(100)} == {None}


def test_one_stopped_process_hangs_the_engine_though_the_others_spin():
    stopped = silence()
    looks = [stopped.look(Vitals(4.0 * n, waits=True, stopped=True), EVERY_S) for n in range(1, MINUTE + 1)]
    assert looks[:-1] == [None] * (MINUTE - 1) and "stopped" in looks[-1]


def test_half_a_minute_of_a_stop_is_forgiven():
    stopped = silence()
    assert {stopped.look(Vitals(0.0, stopped=True), EVERY_S) for _ in range(MINUTE // 2)} == {None}
    assert stopped.look(Vitals(1.0), EVERY_S) is None and stopped.idle_s == 0.0


def test_what_passed_while_the_watcher_was_stopped_is_held_against_nobody():
    waiting = silence()
    assert waiting.look(Vitals(0.0), 3600.0) is None and waiting.total_s == 2 * EVERY_S


def test_the_kernel_tells_what_a_group_is_at():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        seen = group_vitals(process.pid)
        assert seen.stopped and not seen.waits
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert not group_vitals(process.pid).stopped
    finally:
        process.kill()
        process.wait()
    assert group_vitals(process.pid) == Vitals(0.0)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY_S", 0.001)
    monkeypatch.setattr(pulse, "SILENT_S", 0.01)


class Clock:
    """Five thousandths of a second pass with each look."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.002
        return self.now_s


async def never() -> None:
    await asyncio.Event().wait()


async def test_silence_is_told_before_the_end_and_a_sign_of_life_ends_it(fast):
    answers: asyncio.Queue[None] = asyncio.Queue()
    watched = Pulse(answers.get, lambda: Vitals(0.0), 1e9, 1e9, Clock())
    watching = asyncio.create_task(watched.watch())
    assert await watched.changed(False) is True
    answers.put_nowait(None)
    assert await watched.changed(True) is False
    watching.cancel()


async def test_an_operation_has_its_own_limit(fast):
    looks = 0

    def look() -> Vitals:
        nonlocal looks
        looks += 1
        if looks == 50:
            released.set()
        return Vitals(0.0)

    released = asyncio.Event()
    watched = Pulse(never, look, 0.01, 1.0, Clock())
    with watched.hold():
        watching = asyncio.create_task(watched.watch())
        await released.wait()
        assert not watching.done()
    assert "do nothing" in await watching


async def test_a_dead_engine_does_not_hang(fast):
    async def dead() -> None:
        raise ChildDied("engine", 1, "/log", "", False)

    assert await Pulse(dead, lambda: Vitals(0.0), 0.01, 1.0, Clock()).watch() == ""


class StuckChild:
    """A process whose core answers nothing."""

    pid, name, alive, fatal, starved, log_path = 1 << 22, "engine r", True, None, False, "/nowhere"

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def next_event(self):
        return {"event": "ready", "seconds": {}, "fingerprint": {}}

    async def call(self, method, **_):
        await self.killed.wait()
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


async def test_a_supervisor_ends_an_engine_that_hangs_and_says_why(fast, monkeypatch, tmp_path):
    child = StuckChild()

    async def spawn(*_, **__):
        return child

    monkeypatch.setattr(replica.Child, "spawn", spawn)
    monkeypatch.setattr(replica, "group_dies_as", lambda *_: None)
    monkeypatch.setattr(replica, "_remove_leftovers", lambda spec: None)
    monkeypatch.setattr(replica, "group_vitals", lambda pgid: Vitals(0.0))
    spec = ReplicaSpec("r", "m", "v1", "/v", "/s", (0,), "cpu", "/shm", 1 << 30)
    supervisor = replica.Replica("/w", str(tmp_path), EngineConfig(hung_idle_s=0.01, hung_busy_s=1.0))
    await supervisor.start(spec)
    async with asyncio.timeout(60):
        assert "it hung" in (await supervisor.wait_dead())["exit"]
    assert (await supervisor.status())["state"] == "dead"


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
    first = str(await refusal(None)).partition("\n")[0]
    assert "its process was ended by SIGSEGV" in first and first.endswith("line 6 | line 7 | line 8")


@pytest.mark.parametrize(("kind", "refused"), [("CoreDied", True), ("CoreKilled", False)])
async def test_start_whose_core_was_killed_says_nothing_of_its_settings(refusal, kind, refused):
    kinds = [each.__name__ for each in getattr(errors, kind).__mro__]
    error = await refusal({"event": "fatal", "type": kind, "kinds": kinds, "message": "its core was ended by SIGILL"})
    assert isinstance(error, EngineRefused) is refused
    assert "start: its core was ended by SIGILL; " in str(error)


async def test_of_a_model_that_may_not_be_opened_the_file_is_told_and_no_log(refusal):
    told = "config.json: has 'auto_map'. So the files of m may not be opened"
    assert str(await refusal({"event": "fatal", "type": "OpeningRefused", "message": told})) == told


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
