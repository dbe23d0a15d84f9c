"""The power helper over its real socket, on the synthetic driver: what it sets, for whom, and what it gives back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pynvml
import pytest

from appliance.power import helper
from appliance.power.helper import Limits, run
from appliance.power.helper_client import HelperAway, HelperClient
from runtime.devices.nvml_power import NvmlPower
from tests.devices_support.nvml import Machine, eight_h100, four_4090

ONE, OTHER = "GPU-h100-0", "GPU-h100-1"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return eight_h100().install(monkeypatch)


@contextlib.asynccontextmanager
async def running(path: Path) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run(path, os.getuid(), NvmlPower()))
    while not path.exists() and not task.done():
        await asyncio.sleep(0)
    try:
        yield task
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # as an init system ends it
        await task


async def until_default(machine: Machine) -> None:
    async with asyncio.timeout(60):
        while any(gpu.limit_mw != 700_000 or gpu.clocks for gpu in machine.gpus):
            await asyncio.sleep(0.01)


async def test_limits_hold_as_long_as_the_connection(machine, tmp_path):
    async with running(tmp_path / "socket"):
        client = HelperClient(tmp_path / "socket")
        assert await client.set({ONE: {"limit_w": 400, "clock_mhz": 1410}, OTHER: {"limit_w": 350}}) == {}
        assert [(gpu.limit_mw, gpu.clocks) for gpu in machine.gpus[:3]] == [
            (400_000, (0, 1410)),
            (350_000, None),
            (700_000, None),
        ]
        assert not machine.users and not machine.opened, "NVML is closed between calls, so that a GPU can be reset"
        assert await client.set({ONE: {"limit_w": 300}}) == {}
        assert [(gpu.limit_mw, gpu.clocks) for gpu in machine.gpus[:2]] == [(300_000, None), (700_000, None)]
        client.close()
        await until_default(machine)
    assert list(tmp_path.iterdir()) == []


async def test_what_was_set_before_comes_back_and_not_the_default(machine, tmp_path):
    machine.gpus[0].limit_mw = 650_000  # by an administrator
    async with running(tmp_path / "socket"):
        client = HelperClient(tmp_path / "socket")
        await client.set({ONE: {"limit_w": 400}})
        await client.set({ONE: {"limit_w": 300}})
    assert machine.gpus[0].limit_mw == 650_000, "the helper's own end restores too"


async def test_a_client_that_is_killed_leaves_nothing_behind(machine, tmp_path):
    script = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        's.sendall(b\'{"do": "set", "devices": {"GPU-h100-0": {"limit_w": 400, "clock_mhz": 900}}}\\n\')\n'
        "print(s.recv(9999).decode(), flush=True); time.sleep(600)\n"
    )
    async with running(tmp_path / "socket"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, str(tmp_path / "socket")), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline()) == {"set": [ONE], "refused": {}}
        assert (machine.gpus[0].limit_mw, machine.gpus[0].clocks) == (400_000, (0, 900))
        other = HelperClient(tmp_path / "socket")
        with pytest.raises(HelperAway, match=f"process {process.pid} has limits set"):
            await other.set({OTHER: {"limit_w": 400}})
        process.kill()
        await process.wait()
        await until_default(machine)
        assert await other.set({OTHER: {"limit_w": 400}}) == {}
        other.close()
        await until_default(machine)


async def test_a_helper_that_was_killed_restores_when_it_starts(machine, tmp_path):
    kept = tmp_path / "socket.before.json"
    Limits(NvmlPower(), kept).set({ONE: {"limit_w": 400, "clock_mhz": 900}})  # and then it dies
    assert machine.gpus[0].limit_mw == 400_000 and kept.exists()
    async with running(tmp_path / "socket"):
        assert (machine.gpus[0].limit_mw, machine.gpus[0].clocks) == (700_000, None)
        assert not kept.exists()


async def test_what_cannot_be_is_refused_by_device(machine, tmp_path):
    async with running(tmp_path / "socket"):
        client = HelperClient(tmp_path / "socket")
        refused = await client.set({ONE: {"limit_w": 900}, "GPU-none": {"limit_w": 300}, OTHER: {"limit_w": 300}})
        assert refused == {
            ONE: "900 W is not possible; between 200 and 700 W are",
            "GPU-none": "this machine has no such device whose limits can be set",
        }
        assert [gpu.limit_mw for gpu in machine.gpus[:2]] == [700_000, 300_000]
        client.close()
        await until_default(machine)


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'{"do": "reboot"}',
        b'{"do": "set"}',
        b'{"do": "set", "devices": {"GPU-h100-0": {"fan": 3}}}',
        b'{"do": "set", "devices": {"GPU-h100-0": {"limit_w": -3}}}',
        b'{"do": "set", "devices": {"GPU-h100-0": {"limit_w": "much"}}}',
        b'{"do": "set", "devices": {"GPU-h100-0": 3}}',
        b"[" * 5000,
    ],
)
async def test_what_is_no_question_changes_nothing(machine, tmp_path, line):
    async with running(tmp_path / "socket"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.write(line + b"\n")
        assert "error" in json.loads(await reader.readline())
        writer.write(b'{"do": "limits"}\n')
        told = json.loads(await reader.readline())["devices"]
        assert told[ONE] == {"limit_w": 700.0, "least_w": 200.0, "most_w": 700.0} and len(told) == 8
        writer.write(b"x" * (2 * helper.MOST_BYTES))
        writer.write(b"\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "a line without end is not read"
        writer.close()


async def test_only_the_boxs_user_and_root_may_ask(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(helper, "_peer", lambda writer: (4711, 4711))
    async with running(tmp_path / "socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
        with pytest.raises(HelperAway, match="user 4711 may not ask"):
            await HelperClient(tmp_path / "socket").set({ONE: {"limit_w": 300}})
    assert machine.gpus[0].limit_mw == 700_000


async def test_without_a_helper_it_says_where_it_looked(tmp_path):
    with pytest.raises(HelperAway, match=f"{tmp_path}/socket.*No such file"):
        await HelperClient(tmp_path / "socket").set({})


async def test_gpus_whose_limits_nobody_sets_have_none(monkeypatch, tmp_path):
    four_4090().install(monkeypatch)
    async with running(tmp_path / "socket"):
        refused = await HelperClient(tmp_path / "socket").set({"GPU-4090-0": {"limit_w": 300}})
        assert refused == {"GPU-4090-0": "this machine has no such device whose limits can be set"}


async def test_a_driver_that_is_away_refuses_all(machine, tmp_path):
    machine.init_error = pynvml.NVMLError_DriverNotLoaded()
    async with running(tmp_path / "socket"):
        refused = await HelperClient(tmp_path / "socket").set({ONE: {"limit_w": 300}})
        assert "Driver Not Loaded" in refused[ONE]


def test_root_runs_nothing_that_others_may_write(tmp_path):
    code = tmp_path / "code.py"
    code.write_text("")
    owners = (os.getuid(),)
    tmp_path.chmod(0o755)
    code.chmod(0o644)
    assert helper.unsafe([str(code)], owners) == ""
    assert str(code) in helper.unsafe([str(code)], (os.getuid() + 1,))
    tmp_path.chmod(0o775)
    assert str(tmp_path) in helper.unsafe([str(code)], owners)


def test_it_does_not_start_where_there_is_nothing_to_set(capsys, monkeypatch):
    monkeypatch.setattr("runtime.devices.cuda._CONTROL", Path("/dev/no-such-device"))
    assert helper.main(["--socket", "/nowhere/socket", "--user", "nobody"]) == 1
    assert "nothing here sets limits" in capsys.readouterr().err
