"""Nodes as the home node sees them, without Ray: joining, leaving, removal; and our changes to Ray."""

import inspect
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from ray._private import node
from ray._private.node import Node
from ray.exceptions import ActorUnschedulableError, GetTimeoutError
from ray.scripts import scripts

from scheduler.core.errors import EffectFailed
from scheduler.core.workload import Device
from scheduler.devices.discovery import logical_devices
from scheduler.devices.host_reading import MemoryReading
from scheduler.ray import nodes as ray_nodes
from scheduler.ray.node import NodeConfig, NodeReport
from scheduler.ray.nodes import Nodes
from scheduler.ray.start import CODES_OF_A_REQUEST, _all_failed, _logging_to, _private_folder
from tests.unit.scheduler.fakes import Handle


class Agent:
    """The actor of a node, with recorded calls and fixed answers."""

    def __init__(self, node_config):
        self.it, self.calls, self.going = node_config, [], False

    def __getattr__(self, method):
        async def remote(*arguments):
            self.calls.append((method, *arguments))
            answers = {"config": self.it, "report": NodeReport(self.going, MemoryReading(64, 32)), "readings": ()}
            return answers.get(method)

        return SimpleNamespace(remote=remote)


def config_of(name, kind="cpu"):
    devices = logical_devices(2, name) if kind == "cpu" else (Device(f"{name}/0", name, 0, "cuda"),)
    root = Path("/dev/shm") / name
    return NodeConfig(name, f"10.0.0.{name[1:]}", devices, root / "run", root, root, (), root / "jobs")


class Machines:
    """Running machines, living agents, and reported changes."""

    def __init__(self):
        self.on, self.agents, self.told = {}, {}, []

    def start(self, node_config):
        self.on[node_config.name] = node_config
        return self.agents.setdefault(f"node:{node_config.name}", Agent(node_config))

    def nodes(self, **named):
        return Nodes(config_of("n0"), lambda name, what, devices: self.told.append((name, what)), **named)


@pytest.fixture
def ray(monkeypatch):
    machines = Machines()

    async def names():
        return list(machines.agents)

    async def alive():
        return {name: {f"device:{device.id}" for device in one.devices} for name, one in machines.on.items()}

    async def started(node_config, ray_id):
        return machines.start(node_config)

    fakes = {"actor_names": names, "find_actor": machines.agents.get, "_alive": alive, "_start": started}
    for name, fake in fakes.items():
        monkeypatch.setattr(ray_nodes, name, fake)
    return machines


@pytest.fixture
async def nodes(ray):
    for name, kind in (("n0", "cpu"), ("n1", "cpu"), ("n2", "cuda")):
        ray.start(config_of(name, kind))
    made = ray.nodes()
    assert made.alike() == ("n0",), "before anything is known a job may not run just anywhere"
    await made.connect()
    return made


async def test_look_drains_devices_of_leaving_node(nodes, ray):
    assert not await nodes.look()
    ray.agents["node:n1"].going = True
    assert await nodes.look(), "the scheduler hears of it"
    health = {device.id: (device.health, device.health_reason) for device in nodes.devices}
    assert health["n0/0"] == ("ok", "")
    assert health["n1/0"] == health["n1/1"] == ("draining", "its node leaves the box")
    assert not await nodes.look(), "once"
    ray.told.clear()
    del ray.on["n1"], ray.agents["node:n1"]
    assert await nodes.look() and ray.told == [("n1", "left")]
    ray.start(config_of("n1"))
    assert await nodes.look()
    assert all(device.health == "ok" for device in nodes.devices), "it is back, and stays"


async def test_look_waits_for_ray_to_confirm_node_loss(nodes, ray, monkeypatch):
    """Ray lists a dying node as alive for a moment; a failed start of its agent must not end the controller."""
    monkeypatch.setattr(ray_nodes, "_start", AsyncMock(side_effect=ActorUnschedulableError("it does not exist")))
    del ray.agents["node:n1"]
    assert not await nodes.look()
    assert nodes.config("n1") is not None
    ray.told.clear()
    del ray.on["n1"]
    assert await nodes.look() and nodes.config("n1") is None and ray.told == [("n1", "lost")]


@pytest.mark.parametrize(
    ("rank", "holds", "in_use"),
    [({"job_id": "j"}, True, True), ({"job_id": ""}, True, True), ({"job_id": ""}, False, False)]
    + [(GetTimeoutError("late"), False, True)],
)
async def test_in_use_counts_a_job_until_its_results_are_home(nodes, ray, rank, holds, in_use):
    ray.agents["rank:n1/0"] = Handle(SimpleNamespace(status=AsyncMock(side_effect=[rank])))
    ray.agents["node:n1"] = Handle(SimpleNamespace(holds_jobs=AsyncMock(return_value=holds)))
    assert await ray_nodes._in_use("n1") is in_use


async def test_look_ends_removed_node_at_every_return(ray):
    out: set[str] = set()
    for name in ("n0", "n1"):
        ray.start(config_of(name))
    nodes = ray.nodes(removed=lambda: out)
    await nodes.connect()
    assert {device.node for device in nodes.devices} == {"n0", "n1"}
    out.add("n1")
    assert await nodes.look() and ("end",) in ray.agents["node:n1"].calls
    assert {device.node for device in nodes.devices} == {"n0"}, "whether or not it ends as it is told"
    assert ray.told == [("n1", "joined"), ("n1", "lost")]
    assert not await nodes.look() and ray.agents["node:n1"].calls.count(("end",)) == 2
    with pytest.raises(EffectFailed, match="node n1 is gone") as failed:
        nodes.here(object, "replica:r1", config_of("n1"))
    assert failed.value.blame == "outside"
    del ray.on["n1"], ray.agents["node:n1"]
    assert not await nodes.look()

    ray.start(config_of("n1"))  # its service manager restarts it, and Ray admits it
    assert not await nodes.look() and ("end",) in ray.agents["node:n1"].calls
    assert {device.node for device in nodes.devices} == {"n0"}
    out.clear()  # an operator invited it again
    assert await nodes.look() and {device.node for device in nodes.devices} == {"n0", "n1"}


def test_ray_folders_are_private_and_logs_are_redirected(tmp_path, monkeypatch):
    assert "try_to_create_directory(self._logs_dir)" in inspect.getsource(Node._init_temp)
    monkeypatch.setattr(node, "try_to_create_directory", _private_folder)
    made, (temp, logs) = object.__new__(Node), (tmp_path / "ray", tmp_path / "logs")
    for folder in (temp, logs):
        folder.mkdir(mode=0o700)
    made._ray_params = SimpleNamespace(temp_dir=str(temp), runtime_env_dir_name="runtime_resources")
    made._session_name = "session_1"
    _logging_to(logs, Node._init_temp)(made, None)
    assert (Path(made.get_logs_dir_path()) / "old").samefile(logs / "old")
    modes = {path.name: path.stat().st_mode & 0o777 for path in [temp, logs, *tmp_path.rglob("*")]}
    assert modes.keys() >= {"ray", "logs", "old", "sockets"} and set(modes.values()) == {0o700}, modes


@pytest.mark.parametrize("code", ["exit 0", "kill -TERM $$", "exit 15", "exit 143", "exit 3"])
def test_ray_ends_when_any_of_its_processes_ends(code):
    """A raylet exits with 0 when its agent is killed, and `ray start --block` would continue without it."""
    raylet = subprocess.Popen(["sh", "-c", code])
    raylet.wait()
    made = object.__new__(Node)
    made.all_processes = {"raylet": [SimpleNamespace(process=raylet)]}
    ((name, ended),) = _all_failed(Node.dead_processes)(made)
    assert (name, ended) == ("raylet", raylet) and ended.returncode not in CODES_OF_A_REQUEST
    source = inspect.getsource(scripts.start.callback)
    assert "deceased = node.dead_processes()" in source and "if process.returncode not in expected" in source
