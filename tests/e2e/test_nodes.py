"""32 devices on four nodes: real Ray nodes on one machine, the real loop and effects; engines and ranks are stand-ins
without a model, because what is tested is who is placed where and what becomes of it when a node dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray._private import services
from ray.cluster_utils import Cluster

from benchmarks.simulator.journal import MemoryJournal
from runtime.processes.kernel import life
from runtime.processes.warm_parents import WarmSpec
from scheduler.core.errors import NodeNameTaken
from scheduler.core.workload import DeploymentView, JobView, Policy
from scheduler.devices.discovery import logical_devices
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray import groups, replicas
from scheduler.ray.effects import RayEffects
from scheduler.ray.node import NodeConfig
from scheduler.ray.nodes import DEVICE_RESOURCE, Nodes, announce
from serve.core.config import EngineConfig
from tests.unit.scheduler.fakes import FakeStore
from weights.format.header import TensorSpec
from weights.format.layout import Layout
from weights.memory.store import WeightStore

pytestmark = pytest.mark.timeout(900)
START_TIMEOUT_S = 240.0
NODES = ("n0", "n1", "n2", "n3")


class StandInReplica:
    """What RayEffects asks of serve.engine.replica.Replica, without an engine."""

    def __init__(self, *_):
        self.state, self.spec = "dead", None

    async def start(self, spec):
        assert Path(spec.version_path).is_dir(), "the version is in this node's shared memory"
        self.state, self.spec = "ready", spec
        return {"pid": os.getpid(), "path": spec.version_path}

    async def status(self):
        spec = self.spec
        return {
            "state": self.state,
            "model": spec.model,
            "version": spec.version,
            "rss_bytes": 1,
            "devices": list(spec.devices),
            "node": spec.node,
            "settings": spec.settings,
            "address": spec.socket_path,
        }

    async def sleep(self):
        self.state = "asleep"
        return {}

    async def wake(self, model, version, path):
        self.state = "ready"
        return {}

    async def stop(self):
        self.state = "dead"

    async def wait_dead(self):
        await asyncio.Event().wait()

    async def life(self):
        return life()


class StandInHost:
    """What a group asks of a RankHost: ranks that are ready at once and train until they are killed."""

    def __init__(self, *_):
        self.reported, self.alive, self.told = {"job_id": "", "rank": 0, "world_size": 0}, False, asyncio.Event()

    async def start(self, spec, rank, world_size, meeting, device, snapshot=None):
        assert Path(spec["base_path"]).is_dir() and Path(spec["train_path"]).is_file(), "both are on this node"
        assert spec["shm_root"] == "/shm" or Path(spec["base_path"]).is_relative_to(spec["shm_root"])
        self.reported, self.alive = {"job_id": spec["job_id"], "rank": rank, "world_size": world_size}, True
        return {"pid": os.getpid()}

    async def status(self):
        return {**self.reported, "alive": self.alive, "done": False, "pid": None}

    async def next_event(self, after=0):
        if after == 0:
            return {"number": 1, "event": "ready", "step": 0, "seconds": {"join": 0.0, "prepare": 0.0}}
        await self.told.wait()
        return None

    async def call(self, method, timeout_s=None, **args):
        return {"phase": "done", "step": 1, "in_phase_s": 0.0}

    async def life(self):
        return life()

    async def kill(self):
        self.alive, self.reported = False, {"job_id": "", "rank": 0, "world_size": 0}
        self.told.set()


class Table:
    """Routing: what is open where."""

    def __init__(self):
        self.sockets, self.versions = {}, {}

    async def open(self, replica_id, model, version, socket_path):
        self.sockets[replica_id], self.versions[replica_id] = socket_path, version

    async def drain(self, replica_id):
        self.sockets.pop(replica_id, None)

    def version(self, replica_id):
        return self.versions[replica_id] if replica_id in self.sockets else ""

    def avoid(self, replica_id, avoided):
        pass  # no gateway chooses between replicas here

    def close(self, replica_id):
        self.sockets.pop(replica_id, None)


class Shelf:
    def __init__(self, path):
        self.path = path

    async def in_memory(self, model, version):
        return self.path

    def taken(self, model, version):
        pass

    def engine_settings(self, model, tensor_parallel):
        return {"kv_cache_bytes": 1 << 20}


class Runs:
    def __init__(self, base, jobs_dir):
        self.base, self.jobs_dir = base, jobs_dir

    async def catch_up(self, job_id): ...

    async def prepare(self, job_id): ...

    def spec(self, job_id, device_kind):
        from train.plan.spec import TrainSpec

        folder = self.jobs_dir / job_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.jsonl").write_text("{}")
        return TrainSpec(
            job_id, str(self.base), str(folder / "train.jsonl"), str(folder), "/shm", "out", device_kind=device_kind
        )

    def taken(self, job_id):
        pass

    def newest_snapshot(self, job_id):
        return None

    def on_event(self, job_id, event): ...

    async def answer(self, job_id, question): ...

    async def will_succeed(self, job_id): ...

    def on_stopped(self, job_id): ...


@pytest.fixture
def cluster(monkeypatch):
    import tests.e2e.test_nodes as here

    cloudpickle.register_pickle_by_value(here)
    monkeypatch.setattr(replicas, "Replica", StandInReplica)
    monkeypatch.setattr(groups, "RankHost", StandInHost)
    for name, value in {
        "RAY_AUTH_MODE": "disabled",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
        "PYTHONPATH": os.getcwd(),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(services, "get_node", patient(services.get_node))
    made, raylets = Cluster(), {}
    for name in NODES:
        resources = {f"{DEVICE_RESOURCE}{device.id}": 1 for device in logical_devices(8, name)}
        raylets[name] = made.add_node(
            num_cpus=1, num_gpus=0, resources=resources, object_store_memory=80 * 2**20, include_dashboard=False
        )
    ray.init(address=made.address, namespace="appliance", log_to_driver=False)
    session = Path(made.head_node.get_session_dir_path())
    yield made, raylets
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(session)
    (session.parent / "session_latest").unlink(missing_ok=True)


def patient(get_node):
    """Of a raylet that starts: Ray gives it 30 s, by a setting that it reads before a test can set it."""

    def wait(*arguments):
        until_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > until_s:
                    raise

    return wait


@pytest.fixture
def folder():
    """Short, because Unix sockets lie below it."""
    made = Path(tempfile.mkdtemp(prefix="n-"))
    yield made
    shutil.rmtree(made)


def node_config(folder: Path, name: str) -> NodeConfig:
    root = folder / name
    for part in ("run/r", "logs", "shm"):
        (root / part).mkdir(parents=True, mode=0o700)
    (root / "shm").chmod(0o700)
    warm = tuple(
        WarmSpec(kind, "json", str(root / "run" / f"{kind}.sock"), str(root / "logs" / f"{kind}.log"))
        for kind in ("serve", "train")
    )
    return NodeConfig(
        name,
        "127.0.0.1",
        logical_devices(8, name),
        root / "run",
        root / "logs",
        root / "shm",
        warm,
        root / "jobs",
    )


def version_in(node_config: NodeConfig, model: str) -> Path:
    store = WeightStore(node_config.shm_root, budget_bytes=None)
    layout = Layout.plan([TensorSpec("w", "F32", (64, 64))])
    with store.reserve(layout, kind="version", model=model, version="v1") as draft:
        return draft.commit(meta={}).path


async def until(condition, what, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)
    assert condition(), what


@pytest.mark.soak  # some thirty processes that import Ray: minutes on two cores
async def test_four_nodes_and_the_loss_of_one(cluster, folder):
    _, raylets = cluster
    configs = {name: node_config(folder, name) for name in NODES}
    for name in NODES[1:]:
        await announce(configs[name])
    with pytest.raises(NodeNameTaken):
        await announce(
            NodeConfig(
                "n1",
                "10.9.9.9",
                configs["n1"].devices,
                *[getattr(configs["n1"], field) for field in ("run_dir", "log_dir", "shm_root", "warm", "jobs_dir")],
            )
        )
    changes = []
    nodes = Nodes(configs["n0"], lambda name, what, devices: changes.append((name, what, len(devices))))
    table = Table()
    await nodes.connect()
    assert [d.id for d in nodes.devices] == [f"{name}/{i}" for name in NODES for i in range(8)]

    served, trained = (version_in(configs["n0"], model) for model in ("m", "b"))
    effects = RayEffects(nodes, table, Shelf(served), Runs(trained, configs["n0"].jobs_dir), EngineConfig())
    jobs = tuple(JobView(f"j{i}", 8, 8, (8,), nodes=NODES) for i in range(2))
    store = FakeStore(Policy("split", 16), jobs, (DeploymentView("m", "v1", 4, 3, 3),))
    journal = MemoryJournal()
    loop = SchedulerLoop(effects, store, journal)
    running = [asyncio.create_task(loop.run()), asyncio.create_task(effects.watch())]
    try:
        await loop.wait_settled(loop.nudge())
        held = {d["id"]: d["holder"] for d in loop.status()["devices"]}
        where = {
            holder: {device.partition("/")[0] for device, found in held.items() if found and found["id"] == holder}
            for holder in {found["id"] for found in held.values() if found}
        }
        assert len(where) == 5 and all(len(on) == 1 for on in where.values()), "no holder spans nodes"
        engines = [r for r in loop.status()["replicas"] if r["state"] == "open"]
        assert len(engines) == 3 == len(table.sockets)
        # The weights of engines elsewhere were copied to their node.
        copies = [
            s.detail["copied_bytes"] for record in journal.since(0) for s in record.steps if s.verb == "start_replica"
        ]
        away = [engine for engine in engines if not engine["devices"][0].startswith("n0/")]
        assert sum(size > 0 for size in copies) == len({engine["devices"][0].partition("/")[0] for engine in away})

        lost = next(iter(where["j0"])) if next(iter(where["j0"])) != "n0" else next(iter(where["j1"]))
        victims = {holder for holder, on in where.items() if on == {lost}}
        raylet = raylets[lost].all_processes["raylet"][0].process
        os.kill(raylet.pid, signal.SIGKILL)
        await until(lambda: len(loop.box.devices) == 24, "the devices to vanish", 120)
        assert changes[-1] == (lost, "lost", 8), "the store is told of what is lost"
        await loop.wait_settled(loop.nudge())
        status = loop.status()
        held = {d["id"]: d["holder"] for d in status["devices"]}
        assert not any(device.startswith(f"{lost}/") for device in held)
        holders = {found["id"] for found in held.values() if found}
        # 24 devices are left for 16 + 12: each job runs on, or waits with the reason; nothing is half there.
        for job in victims & {"j0", "j1"}:
            moved = [device for device, found in held.items() if found and found["id"] == job]
            assert len(moved) == 8 or store.reasons[job], (job, held)
        assert all(r["devices"] and not r["devices"][0].startswith(lost) for r in status["replicas"])
        assert {r["id"] for r in status["replicas"] if r["state"] == "open"} <= holders
    finally:
        loop.stop()
        running[1].cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert not isinstance(ended[0], Exception), ended[0]
