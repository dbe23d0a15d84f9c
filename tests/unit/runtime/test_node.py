"""The node agent restarts its warm parents; their children survive without them."""

import asyncio
import contextlib
import os
import signal

import psutil
import pytest

from runtime.errors import WarmParentError
from runtime.processes.child import Child
from runtime.processes.warm_parent import NodeAgent, WarmSpec

ENTRY = "tests.unit.runtime.entries"


def spec(folder, preload=ENTRY):
    return WarmSpec("t", preload, str(folder / "w.sock"), str(folder / "w.log"))


def warm_pid(folder):
    """The pid of the warm parent of this folder, or None."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # the process has just ended
            if str(folder / "w.sock") in child.cmdline():
                return child.pid
    return None


async def test_killed_warm_parent_restarts_and_its_child_survives(tmp_path):
    agent = NodeAgent([spec(tmp_path)])
    await agent.start()
    await agent.wait_warm("t", 60)
    first = warm_pid(tmp_path)
    child = await Child.spawn(tmp_path / "w.sock", f"{ENTRY}:echo", {}, log_path=tmp_path / "c.log", name="c")

    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while warm_pid(tmp_path) in (None, first):
            await asyncio.sleep(0.01)
    await agent.wait_warm("t", 60)

    assert (await child.call("echo"))["pid"] == child.pid
    second = await Child.spawn(tmp_path / "w.sock", f"{ENTRY}:echo", {}, log_path=tmp_path / "c.log", name="c2")
    assert (await second.call("echo"))["pid"] == second.pid
    await asyncio.gather(child.kill_and_wait(), second.kill_and_wait())
    await agent.stop()


@pytest.mark.parametrize(
    ("preload", "how"),
    [
        ("no_such_module_at_all", ["exit code 1", "No module named 'no_such_module_at_all'"]),
        ("tests.unit.runtime.ends_by_sigill", ["SIGILL", "about to compute"]),
    ],
)
async def test_wait_warm_raises_at_once_if_import_kills_parent(tmp_path, preload, how):
    """`status` shows only the first line, so it has the exit status and the last log line."""
    agent = NodeAgent([spec(tmp_path, preload)])
    await agent.start()
    with pytest.raises(WarmParentError) as refused:
        async with asyncio.timeout(60):
            await agent.wait_warm("t", 3600)
    await agent.stop()
    first = str(refused.value).partition("\n")[0]
    assert all(part in first for part in how)
