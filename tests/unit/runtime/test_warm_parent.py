"""The warm parent, the lifeline and the child, with real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest

from runtime.errors import ChildDied, ChildError, ChildTimeout, WarmParentError
from runtime.processes.child import Child
from runtime.processes.kernel import group_pids, group_rss_bytes

ENTRY = "tests.unit.runtime.entries"


def start_parent(folder):
    command = [sys.executable, "-m", "runtime.processes.warm_parent", folder / "warm.sock", ENTRY, folder / "warm.log"]
    below_ray = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)  # as Ray has it
    parent = subprocess.Popen(command, preexec_fn=below_ray)
    while not (folder / "warm.sock").exists():
        assert parent.poll() is None, (folder / "warm.log").read_text()
    return parent


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    parent = start_parent(folder)
    yield folder / "warm.sock"
    parent.terminate()
    assert parent.wait(60) == 0


async def spawn(warm, tmp_path, entry="echo", **kw):
    return await Child.spawn(
        warm, f"{ENTRY}:{entry}", kw.pop("args", {"x": 1}), log_path=tmp_path / "child.log", name="child", **kw
    )


async def test_spawn_forks_process_with_preloaded_modules(warm, tmp_path):
    child = await spawn(warm, tmp_path, env={"SPAWN_TEST": "yes"})
    answer = await child.call("echo", a=[1, "ü"])
    assert answer["pid"] == child.pid != os.getpid()
    assert answer["preloaded_in"] != child.pid
    assert answer["args"] == {"x": 1} and answer["got"] == {"a": [1, "ü"]}
    assert await child.call("env", name="SPAWN_TEST") == "yes"
    assert group_rss_bytes(child.pid) > 0
    assert os.stat(warm).st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "child.log").st_mode & 0o777 == 0o600
    assert await child.call("let_go") == [answer["preloaded_in"]], "of drivers: the parent, once, after its imports"
    assert await child.call("asked") == [child.pid], "for instructions, before its entry began"
    assert await child.call("core_bytes") == [0, 0], "what is aborted is written nowhere"
    assert await child.stop(10)
    assert not child.alive


async def test_child_last_event_is_read_after_failed_call(warm, tmp_path):
    child = await spawn(warm, tmp_path, "says_and_ends")
    while os.path.exists(f"/proc/{child.pid}"):  # this loop reads nothing meanwhile
        time.sleep(0.01)
    time.sleep(0.1)  # until the warm parent has closed the lifeline
    with pytest.raises(ChildDied):
        await child.call("ping")
    assert (await child.next_event())["event"] == "done"
    await child.closed()
    assert child.how_it_ended() == "ended with exit code 0"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGILL, signal.SIGSEGV, 3], ids=str)
async def test_child_exit_status_is_known_to_supervisor(warm, tmp_path, by):
    child = await spawn(warm, tmp_path)
    if isinstance(by, signal.Signals):
        os.kill(child.pid, by)
    else:
        with pytest.raises(ChildDied):
            await child.call("exit", status=by)
    await child.closed()
    await child.kill_and_wait()
    expected = by.name if isinstance(by, signal.Signals) else f"exit code {by}"
    assert expected in child.how_it_ended()


async def test_child_sends_exceptions_futures_and_events(warm, tmp_path):
    child = await spawn(warm, tmp_path)
    with pytest.raises(ChildError, match="ValueError: no good") as caught:
        await child.call("fail", message="no good")
    assert caught.value.type == "ValueError"
    with pytest.raises(ChildError, match="no such call 'absent'"):
        await child.call("absent")
    with pytest.raises(ChildError, match="set cannot be sent"):
        await child.call("set")
    assert await child.call("later", value=21) == 42
    await child.call("emit", n=3)
    assert [(await child.next_event())["i"] for _ in range(3)] == [0, 1, 2]
    await child.kill_and_wait()
    assert await child.next_event() is None


async def test_kill_ends_whole_group_and_fails_pending_calls(warm, tmp_path):
    child = await spawn(warm, tmp_path)
    grandchild = await child.call("fork")
    assert sorted(group_pids(child.pid)) == sorted([child.pid, grandchild])
    with pytest.raises(ChildTimeout):
        await child.call("hang", timeout_s=0.05)
    pending = asyncio.create_task(child.call("echo"))
    await child.kill_and_wait()
    with pytest.raises(ChildDied, match="child.log"):
        await pending
    assert group_pids(child.pid) == []


async def test_child_death_is_noticed_while_grandchild_lives(warm, tmp_path):
    child = await spawn(warm, tmp_path)
    await child.call("fork")
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.wait_for(child.closed(), 60)
    await child.kill_and_wait()
    assert group_pids(child.pid) == []


@pytest.mark.parametrize(
    ("entry", "grandchild"),
    [("echo", "await c.call('fork')"), ("starting", "(await c.next_event())['grandchild']")],
    ids=["that answers", "that is still starting"],
)
def test_child_dies_with_its_supervisor(warm, tmp_path, entry, grandchild):
    script = (
        "import asyncio, os, sys\n"
        "from runtime.processes.child import Child\n"
        "async def go():\n"
        f"    log = {str(tmp_path / 'c.log')!r}\n"
        f"    c = await Child.spawn({str(warm)!r}, '{ENTRY}:{entry}', {{}}, log_path=log, name='c')\n"
        f"    print(c.pid, {grandchild}, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(go())\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, grandchild = map(int, supervisor.stdout.readline().split())
    assert group_pids(pid) == sorted([pid, grandchild])
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    for _ in range(1000):
        if not group_pids(pid):
            break
        os.sched_yield()
        subprocess.run(["sleep", "0.01"], check=True)
    assert group_pids(pid) == []


async def test_spawn_without_warm_parent_raises_named_error(tmp_path):
    with pytest.raises(WarmParentError, match="did not fork"):
        await spawn(tmp_path / "absent.sock", tmp_path)


async def test_warm_parent_with_a_silent_client_still_forks(warm, tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(warm))
        child = await spawn(warm, tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.closed(), 3)
        child = await spawn(warm, tmp_path)
        assert await child.stop(10)


async def test_child_killed_within_large_frame_has_exit_status(warm, tmp_path):
    child = await spawn(warm, tmp_path)
    await child.call("flood")
    time.sleep(0.3)  # the child fills the socket, which this loop does not read
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.3)
    await asyncio.wait_for(child.closed(), 60)
    assert "SIGKILL" in child.how_it_ended()


@pytest.mark.parametrize(
    ("end", "starved"),
    [("kill", True), ("killed long after", False), ("killed by us", False), ("exit", False), ("core killed", True)],
)
async def test_child_is_starved_only_if_killed_during_oom_kill(warm, tmp_path, monkeypatch, end, starved):
    monkeypatch.setattr("runtime.processes.child.KILLS_EVERY_S", 0.01 if end == "killed long after" else 3600.0)
    child = await spawn(warm, tmp_path)
    counted = []
    monkeypatch.setattr("runtime.processes.child.kills_so_far", lambda: counted.append(1) or 1 << 40)
    if end == "killed long after":
        while len(counted) < 3:
            await asyncio.sleep(0.01)
    if end.startswith("kill") and end != "killed by us":
        os.kill(child.pid, signal.SIGKILL)
    elif end == "killed by us":
        child.kill()
    else:
        if end == "core killed":
            await child.call("end_with", kind="CoreKilled")
        with pytest.raises(ChildDied):
            await child.call("exit", status=1)
    await child.closed()
    assert child.starved == starved


async def test_child_death_is_noticed_after_parent_restart(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.processes.child.kills_so_far", lambda: 0)
    first = start_parent(tmp_path)
    child = await spawn(tmp_path / "warm.sock", tmp_path)
    first.terminate()
    first.wait()
    monkeypatch.setattr("runtime.processes.child.kills_so_far", lambda: 1)
    child.kill()
    await asyncio.wait_for(child.closed(), 60)
    assert child.how_it_ended() == "ended"


async def test_child_death_is_noticed_while_later_children_live(warm, tmp_path):
    """A fork inherits the parent's end of all earlier lifelines."""
    first, second = await spawn(warm, tmp_path), await spawn(warm, tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.wait_for(first.closed(), 60)
    assert second.alive and (await second.call("echo"))["pid"] == second.pid
    await second.kill_and_wait()
