"""Supervision of child processes, tested with small real processes."""

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from appliance.boot import supervised_process
from appliance.boot.main import HOPELESS, Box, BoxState
from appliance.boot.supervised_process import BOX_VARIABLE, HUNG_S, Supervised, clear_leftovers
from appliance.config import BoxConfig
from appliance.paths import BoxPaths
from runtime.background_tasks import BackgroundTasks
from runtime.processes.kernel import group_pids

SLEEPER = "import time; print('up', flush=True); time.sleep(3600)"
STUBBORN = (
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
)
POLITE = (
    "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True);"
    "time.sleep(3600)"
)


def starter(code):
    async def start():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        await process.stdout.readline()
        return process

    return start


@pytest.fixture
async def background():
    made = BackgroundTasks()
    yield made
    await made.stop()


async def test_killed_process_restarts_until_a_start_succeeds(monkeypatch, background):
    monkeypatch.setattr(supervised_process, "_PAUSES_S", (0.0, 0.0))
    said, starts, real = [], [], starter(SLEEPER)

    async def start():
        starts.append(1)
        if len(starts) in (2, 3):
            raise OSError(12, "Cannot allocate memory")
        return await real()

    one = Supervised("worker", start, background, said.append)
    await one.begin()
    first = one.pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while one.pid in (None, first):
            await asyncio.sleep(0.005)
    assert said == ["worker ended with -9"] and one.failures == 3
    (trouble,) = background.degraded()
    assert (trouble["name"], trouble["failures"]) == ("worker", 3) and "Cannot allocate memory" in trouble["why"]
    second = one.pid
    await background.stop()
    assert not await one.end(10)  # a sleeper has no SIGTERM handler, so its exit status is not 0
    assert group_pids(second) == []


async def test_end_kills_only_process_that_ignores_sigterm():
    background, said = BackgroundTasks(), []
    polite = Supervised("polite", starter(POLITE), background, lambda _: None)
    stubborn = Supervised("stubborn", starter(STUBBORN), background, said.append)
    await polite.begin()
    await stubborn.begin()
    pid = stubborn.pid
    await background.stop()
    assert await polite.end(10)
    assert not await stubborn.end(0.1)
    assert said == ["stubborn did not end within 0 s: killed"]
    assert group_pids(pid) == []


def test_clear_leftovers_kills_only_processes_of_this_box(tmp_path):
    def sleeper(box):
        return subprocess.Popen(
            [sys.executable, "-c", SLEEPER], env={**os.environ, BOX_VARIABLE: box}, stdout=subprocess.PIPE
        )

    paths = BoxPaths.of(tmp_path / "data", tmp_path)
    mine, other = sleeper(paths.box_id), sleeper("cafe0002")
    mine.stdout.readline(), other.stdout.readline()
    assert clear_leftovers(paths) == [mine.pid]
    assert not psutil.pid_exists(mine.pid) and other.poll() is None
    other.kill()
    other.wait()
    mine.stdout.close(), other.stdout.close()


class Answers:
    """A supervised process with fake time, pid and probe answers, which the test sets for `look`."""

    def __init__(self, monkeypatch):
        self.now_s, self.said, self.pids, self.answers = 0.0, [], 7, False
        self.one = Supervised("controller", None, None, self.said.append, self, lambda: self.now_s)
        monkeypatch.setattr(Supervised, "pid", property(lambda _: self.pids))
        monkeypatch.setattr(Supervised, "restart", lambda _: setattr(self, "pids", self.pids + 1))

    async def ask(self):
        if not self.answers:
            raise httpx.ConnectError("it hangs")


async def test_look_restarts_process_only_after_long_silence(monkeypatch):
    process = Answers(monkeypatch)
    await process.one.look()  # the first probe starts the silence timer
    process.now_s, process.answers = HUNG_S - 1, True
    await process.one.look()
    process.now_s, process.answers = 2 * HUNG_S - 2, False
    await process.one.look()
    assert process.said == []
    process.now_s += 1
    await process.one.look()
    assert len(process.said) == 1 and process.pids == 8
    process.now_s += HUNG_S + 1
    await process.one.look()  # the replacement gets the full time limit
    process.pids = None
    process.now_s += HUNG_S + 1
    await process.one.look()  # `look` ignores a process that is starting
    assert len(process.said) == 1


async def test_repeatedly_failing_process_stops_the_box(tmp_path):
    paths = BoxPaths.of(tmp_path / "box", tmp_path)
    paths.create()
    stopped = []
    box = Box(BoxConfig(), paths, BoxState(paths.state_file), lambda: stopped.append(1))
    box._ray.failures = HOPELESS - 1
    await box._report_troubles()
    assert stopped == []
    box._ray.failures += 1
    await box._report_troubles()
    assert stopped == [1] and "ray failed" in box.hopeless


@pytest.mark.parametrize("answered", [False, True])
async def test_end_reports_unsaved_weights_only_if_controller_answered(tmp_path, monkeypatch, answered):
    async def killed(timeout_s):
        return False

    paths = BoxPaths.of(tmp_path / "box", tmp_path)
    paths.create()
    box = Box(BoxConfig(), paths, BoxState(paths.state_file))
    box._controller_answered = answered
    monkeypatch.setattr(box._controller, "end", killed)
    assert bool(await box.end()) is answered
    assert paths.shm_root.exists()


async def test_failures_are_counted_until_process_runs_steadily(monkeypatch):
    now_s, failures = 0.0, []

    class Ended:
        pid, returncode = 0, 1

        async def wait(self):
            nonlocal now_s
            now_s += 1000.0 if len(failures) == 5 else 0.0
            return 1

    async def start():
        nonlocal now_s
        now_s += 100.0
        failures.append(process.failures)
        if 1 < len(failures) < 5:
            raise OSError(12, "Cannot allocate memory")
        if len(failures) > 5:
            await asyncio.Event().wait()
        return Ended()

    monkeypatch.setattr(supervised_process, "kill_group", lambda _pid: None)
    background = BackgroundTasks(lambda _seconds: asyncio.sleep(0))
    process = Supervised("ray", start, background, lambda _: None, None, lambda: now_s)
    await process.begin()
    while len(failures) < 6:
        await asyncio.sleep(0)
    await background.stop()
    assert failures == [0, 1, 2, 3, 4, 1]
