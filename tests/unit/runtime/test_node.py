"""The node agent keeps its warm parents alive, and their children do not need them."""

import asyncio
import os
import signal

import pytest

from runtime.errors import WarmParentError
from runtime.processes.child import Child
from runtime.processes.warm_parents import NodeAgent, WarmSpec

ENTRY = "tests.unit.runtime.entries"


def spec(folder, preload=ENTRY):
    return WarmSpec("t", preload, str(folder / "w.sock"), str(folder / "w.log"))


async def test_a_killed_warm_parent_comes_back_and_its_child_lives_on(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.processes.warm_parents.RESTART_PAUSE_S", 0.0)
    agent = NodeAgent([spec(tmp_path)])
    await agent.start()
    await agent.wait_warm("t", 60)
    first = (await agent.status())["warm"]["t"]["pid"]
    child = await Child.spawn(tmp_path / "w.sock", f"{ENTRY}:echo", {}, log_path=tmp_path / "c.log", name="c")

    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        while (await agent.status())["warm"]["t"]["pid"] == first:
            await asyncio.sleep(0.01)
    await agent.wait_warm("t", 60)

    assert (await child.call("echo"))["pid"] == child.pid
    second = await Child.spawn(tmp_path / "w.sock", f"{ENTRY}:echo", {}, log_path=tmp_path / "c.log", name="c2")
    assert (await second.call("echo"))["pid"] == second.pid
    await asyncio.gather(child.kill_and_wait(), second.kill_and_wait())
    await agent.stop()


async def test_a_preload_that_cannot_be_imported_is_reported_with_its_log(tmp_path):
    """In its first line, which is what `status` shows: there it ended with "its log ends with:"."""
    agent, first = NodeAgent([spec(tmp_path, preload="no_such_module_at_all")]), ""
    await agent.start()
    async with asyncio.timeout(60):
        while "No module named 'no_such_module_at_all'" not in first:
            with pytest.raises(WarmParentError) as refused:
                await agent.wait_warm("t", 0.01)
            first, _, log = str(refused.value).partition("\n")
    assert "it ends each time with" in first and "Traceback" in log
    await agent.stop()
