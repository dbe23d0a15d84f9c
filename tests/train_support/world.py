"""Real groups of forked ranks for end-to-end tests: a warm parent, a store in shared memory, recorded events."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from runtime.processes.child import Child
from runtime.processes.kernel import group_pids
from runtime.processes.warm_parent import WARM_ENV
from tests.claims import claim
from tests.train_support.sampled import Sampler, counts_a, teaches
from tests.train_support.specs import tokenised
from tests.train_support.tiny import (
    make_model_dir,
    write_chat_file,
    write_marked_file,
    write_pair_file,
    write_prompt_file,
)
from train.control.group import Group, PingLimits, RankHost
from train.convert.remake import quantise
from train.plan.spec import TrainSpec
from train.trainer.engine import meeting_url
from weights.format.names import step_of
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore

REPOSITORY = Path(__file__).resolve().parents[2]
# Relative tolerance. Gradients are reduced and accumulated in fp32 and clipped by a coarse norm. Only the order of a
# few fp32 sums differs: some ulps of the loss after a dozen steps, depending on the CPU.
ACROSS_SIZES = 3e-6

# Method -> (data writer, options).
SAMPLES = {
    "compute_multiplier": 1.0,
    "eval_samples": 1,
    "max_completion_tokens": 16,
    "group": 8,
    "rows": 2,
    "policy": "version",
    "staleness": 0,
}
METHODS = {
    "supervised": (write_chat_file, {}),
    "dpo": (write_pair_file, {"beta": 0.1}),
    "kto": (write_marked_file, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
    "orpo": (write_pair_file, {"beta": 0.1}),
    "reinforcement": (write_prompt_file, SAMPLES),
    "distillation": (write_prompt_file, {**SAMPLES, "samples": 8.0}),
}
# Method with graded answers -> step metric of the verdict.
JUDGED = {"reinforcement": "train_mean_reward", "distillation": "reverse_kl"}

# Long limits: two cores run up to four ranks and other processes.
PATIENT = PingLimits(ping_every_s=0.5, ping_timeout_s=20.0, phase_limit_s=120.0)


def losses_of(worlds: list[Launched]) -> dict[int, float]:
    return {step: loss for world in worlds for step, loss in world.losses().items()}


def worst(losses: dict[int, float], reference: dict[int, float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(loss - reference[step]) / reference[step] for step, loss in losses.items())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class WarmParent:
    """A warm parent with socket and log in a folder; its forks can import the tests."""

    def __init__(self, folder: Path, preload: str) -> None:
        self.socket, self._log = folder / "warm.sock", folder / "warm.log"
        options = [str(self.socket), preload, str(self._log)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.processes.warm_parent", *options],
            cwd=REPOSITORY,
            env={**os.environ, **dict(WARM_ENV), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )

    def wait(self) -> None:
        while not self.socket.exists():
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(10) == 0


class WarmTrain:
    """A warm parent with `train.trainer.preload`, shared by a test module."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="train-"))
        self._parent = WarmParent(self.folder, "train.trainer.preload")
        self.socket = self._parent.socket

    def wait(self) -> WarmTrain:
        self._parent.wait()
        return self

    def close(self) -> None:
        self._parent.close()
        shutil.rmtree(self.folder)


@dataclass
class Workshop:
    """Data, a base model and a weight store for the jobs of one test; `close` removes everything."""

    warm: WarmTrain
    folder: Path
    shm: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="train-test-", dir="/dev/shm")))

    def __post_init__(self) -> None:
        claim(self.shm.name)
        self.store = WeightStore(self.shm / "store", budget_bytes=None)
        self.base = self.folder / "base"

    def spec(
        self,
        job_id: str = "job",
        *,
        examples: int = 64,
        model: dict[str, Any] | None = None,
        form: str | None = None,
        write: Callable[..., Path] | None = None,
        **fields: Any,
    ) -> TrainSpec:
        """Make a job spec. form: quantisation of the base (train.convert.remake.FORMS). write: another data writer."""
        if not self.base.exists():
            made = make_model_dir(self.folder / "made" if form else self.base, **(model or {}))
            if form:
                quantise(made, self.base, form)
        of_method, options = METHODS[fields.get("method", "supervised")]
        write = write or of_method
        data = self.folder / f"{write.__name__}-{examples}.jsonl"
        if not data.exists():
            tokenised(write(data, examples), self.base, fields.get("method", "supervised"))
        defaults = {
            "job_id": job_id,
            "base_path": str(self.base),
            "train_path": str(data),
            "run_dir": str(self.folder / job_id),
            "shm_root": str(self.shm / "store"),
            "output_model": f"ft:base:{job_id}",
            "max_length": 96,
            "batch_size": 4,
            "n_epochs": 2,
            "learning_rate": 2e-3,
            "snapshot_every_s": 0.0,
            "zero_stage": 2,
            "options": options,
            "precision": "fp32",  # bf16 is 10 to 100 times slower on a CPU without bf16
        }
        return TrainSpec(**(defaults | fields), device_kind="cpu")

    def launch(
        self, spec: TrainSpec, size: int, *, snapshot: str | None = None, limits: PingLimits = PATIENT
    ) -> Launched:
        return Launched(self, spec, size, snapshot, limits)

    async def run(self, spec: TrainSpec, size: int, *, snapshot: str | None = None) -> Launched:
        """Run a group from start to end and assert success."""
        launched = await self.launch(spec, size, snapshot=snapshot).start()
        outcome = await launched.group.wait()
        assert outcome.outcome == "succeeded", (outcome, launched.logs())
        return launched

    async def moved(self, spec: TrainSpec, *sizes: int) -> list[Launched]:
        """Run a job on groups of these sizes, suspended after two steps in each size but the last.

        No step may run twice, and a suspended group must leave no process."""
        worlds: list[Launched] = []
        snapshot, done = None, set[int]()
        for number, size in enumerate(sizes, 1):
            world = await self.launch(spec, size, snapshot=snapshot).start()
            worlds.append(world)
            pids, report = world.pids(), None
            if number < len(sizes):
                await world.reached(max(done, default=0) + 2)
                report = await world.group.suspend()
            outcome = await world.group.wait()
            assert outcome.outcome == ("suspended" if report else "succeeded"), (number, outcome, world.logs())
            assert not any(group_pids(pid) for pid in pids), "the devices must be free"
            assert not done & world.losses().keys(), "no step is done twice"
            done |= world.losses().keys()
            if report is None:
                break
            assert report.step >= max(done) and report.bytes > 0
            snapshot = report.snapshot_path
        return worlds

    async def compare_publish(self, spec: TrainSpec, size: int) -> list[dict[str, Any]]:
        """Events of `entries.compare_publish`, by rank."""
        meeting = self.folder / uuid.uuid4().hex
        ranks = [
            await Child.spawn(
                self.warm.socket,
                "tests.train_support.entries:compare_publish",
                {"spec": asdict(spec), "meeting": meeting_url(meeting, rank, size)},
                env={"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"},
                log_path=self.folder / f"{rank}.log",
                name=f"rank {rank}",
            )
            for rank in range(size)
        ]
        told = []
        for child in ranks:
            told.append(await asyncio.wait_for(child.next_event(), 60))
            logs = "".join((self.folder / f"{r}.log").read_text()[-3000:] for r in range(size))
            assert told[-1]["event"] == "compared", (told[-1], logs)
        for child in ranks:
            await child.kill_and_wait()
        return told

    def published(self, spec: TrainSpec) -> tuple[dict[str, torch.Tensor], StoredVersion]:
        """The tensors of the newest published version of a run, and the stored version."""
        made = [v for kind in ("version", "adapter") for v in self.store.list(kind) if v.model == spec.output_model]
        assert len(made) == 1 or spec.publishes_epochs
        stored = max(made, key=lambda one: step_of(one.version))
        return {k: v for file in stored.path.glob("*.safetensors") for k, v in load_file(file).items()}, stored

    def compare_published(self, *specs: TrainSpec) -> None:
        """Assert that the published weights of runs differ at most by bf16 rounding."""
        one, other = (self.published(spec)[0] for spec in specs)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=2**-7, atol=1e-4)

    def close(self) -> None:
        shutil.rmtree(self.shm)


class Launched:
    """One group with its hosts and recorded events."""

    def __init__(self, shop: Workshop, spec: TrainSpec, size: int, snapshot: str | None, limits: PingLimits):
        self.spec, self.events = spec, []
        self._snapshot = snapshot
        self._news = asyncio.Event()
        self._log_dir = shop.folder / "logs"
        self.hosts = [RankHost(str(shop.warm.socket), str(self._log_dir), limits=limits) for _ in range(size)]
        self.sampler = Sampler(judge=teaches if spec.method == "distillation" else counts_a)
        self.group = Group(self._note)

    async def start(self) -> Launched:
        await self.group.start(self.spec, self.hosts, ["cpu"] * len(self.hosts), self._snapshot)
        return self

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.of("metrics")}

    async def reached(self, step: int) -> None:
        """Wait until `step` optimizer steps are done or the group has ended."""
        while not any(e["event"] == "finished" or e.get("step", -1) >= step for e in self.events):
            self._news.clear()
            await self._news.wait()

    async def killed(self, *ranks: int) -> dict[str, Any]:
        """Kill these ranks after two steps and a snapshot; return the newest snapshot after the failure."""
        await self.reached(2)
        while not self.of("snapshot"):
            await asyncio.sleep(0.01)
        pids = self.pids()
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)
        outcome = await self.group.wait()
        assert outcome.outcome == "failed" and outcome.error.retryable, outcome
        # By its end, long before it would have been missed at a ping.
        assert " died" in str(outcome.error) and outcome.error.rank in ranks, outcome
        assert not any(group_pids(pid) for pid in pids)
        return self.of("snapshot")[-1]

    def pids(self) -> list[int]:
        return [host._child.pid for host in self.hosts]

    def logs(self) -> str:
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(self._log_dir.glob("*.log")))

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._news.set()
        if event["event"] == "policy":
            self.sampler.policy(self.spec, event["step"])
