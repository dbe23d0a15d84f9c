"""Training state in motion: suspend, resume at the same and at another size, snapshots and versions of a run.

    python benchmarks/suspend_resume.py [--sizes 5M 50M] [--zero 2] [--rounds 5] [--json FILE]

Worlds of 4 and then of 8 ranks train a random Llama, forked from the warm parent. Each is suspended (`Group.suspend`: a
snapshot in shared memory, processes gone) and resumed at its size, and at last at half of it, until the first step is
done. Steps are kept short: this is about moving state. The time to copy the state once (one thread, pages mapped) is
measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_most, record, stated  # noqa: E402 - the repository has to be on the path first
from benchmarks._models import SIZES  # noqa: E402
from runtime.processes.warm_parents import WARM_ENV  # noqa: E402
from tests.e2e.engine_support import save_model  # noqa: E402
from train.control.group import Group, PingLimits  # noqa: E402
from train.control.rank_host import RankHost  # noqa: E402
from train.plan.spec import TrainSpec  # noqa: E402

EXAMPLES = 36  # nine steps of an epoch, each of which ends with a version
STEPS = 20  # of the world of 4 before its first suspension


class Watcher:
    """What a group tells, with the time it was heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, dict[str, Any]]] = []
        self._news = asyncio.Event()

    def __call__(self, event: dict[str, Any]) -> None:
        self.heard.append((time.monotonic(), event))
        self._news.set()

    def seconds(self, kind: str) -> float:
        return statistics.median(event["seconds"] for _, event in self.heard if event["event"] == kind)

    async def stepped(self, count: int) -> float:
        """When the `count`-th step of this world was heard of."""
        while len(steps := [at for at, event in self.heard if event["event"] == "metrics"]) < count:
            assert all(event["event"] != "finished" for _, event in self.heard), self.heard[-1]
            self._news.clear()
            await self._news.wait()
        return steps[count - 1]


@dataclass
class Moves:
    """Worlds of one size: seconds of each suspension (of its first part, until the ranks agree on it, and of the rest)
    and of each resumption, until all ranks train and until the first step is done."""

    state_bytes: int = 0
    agree_s: list[float] = field(default_factory=list)
    suspend_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "warm.sock"
        command = [sys.executable, "-m", "runtime.processes.warm_parent", "--socket", str(self.socket)]
        command += ["--preload", "train.trainer.preload", "--log", str(folder / "warm.log")]
        self.parent = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **dict(WARM_ENV)})

    async def start(self, spec: TrainSpec, size: int, snapshot: str | None = None) -> tuple[Group, Watcher, float]:
        """A new world, and when it began to start."""
        watcher, began_s = Watcher(), time.monotonic()
        group = Group(watcher, PingLimits(ping_timeout_s=60.0))
        hosts = [RankHost(str(self.socket), str(self.folder / "logs")) for _ in range(size)]
        await group.start(spec, hosts, ["cpu"] * size, snapshot)
        return group, watcher, began_s

    async def move(self, moves: Moves, group: Group, spec: TrainSpec, size: int) -> Group:
        """Suspend, and resume with `size` ranks."""
        report = await group.suspend()
        assert report is not None
        group, watcher, began_s = await self.start(spec, size, report.snapshot_path)
        moves.ready_s.append(time.monotonic() - began_s)
        moves.step_s.append(await watcher.stepped(1) - began_s)
        await watcher.stepped(3)
        moves.state_bytes = report.bytes
        moves.agree_s.append(report.seconds["agree"])
        moves.suspend_s.append(report.seconds["snapshot"] + report.seconds["exit"])
        return group

    async def run(self, spec: TrainSpec, rounds: int) -> dict[str, Any]:
        while not self.socket.exists():
            assert self.parent.poll() is None, (self.folder / "warm.log").read_text()
            await asyncio.sleep(0.05)
        group, watcher, _ = await self.start(replace(spec, snapshot_every_s=0.5), 4)
        await watcher.stepped(STEPS)
        found = {"snapshot_stall_s": watcher.seconds("snapshot"), "publish_stall_s": watcher.seconds("published")}
        found |= await self.moved(group, spec, 4, rounds)
        spec = replace(spec, batch_size=8, job_id="eight", run_dir=f"{spec.run_dir}8")
        group, watcher, _ = await self.start(spec, 8)
        await watcher.stepped(3)
        return found | await self.moved(group, spec, 8, rounds)

    async def moved(self, group: Group, spec: TrainSpec, size: int, rounds: int) -> dict[str, Moves]:
        same, half = Moves(), Moves()
        for _ in range(rounds):
            group = await self.move(same, group, spec, size)
        group = await self.move(half, group, spec, size // 2)
        await group.kill()
        return {f"{size} to {size}": same, f"{size} to {size // 2}": half}

    def close(self) -> None:
        self.parent.terminate()
        self.parent.wait()


def spec_of(folder: Path, disk: Path, size: str, zero: int) -> TrainSpec:
    import torch

    save_model(folder / "model", seed=1, max_position_embeddings=2048, **SIZES[size])
    with open(folder / "chat.jsonl", "w") as file:
        for number in range(EXAMPLES):
            answer = " ".join(map(str, range(number % 60))) + " done"
            messages = [{"role": "user", "content": f"count to {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return TrainSpec(
        job_id="four",
        base_path=str(folder / "model"),
        train_path=str(folder / "chat.jsonl"),
        run_dir=str(disk / "run"),
        shm_root=str(folder / "store"),
        output_model="ft:bench",
        max_length=32,
        batch_size=4,
        packing=False,
        zero_stage=zero,
        snapshot_every_s=0.0,
        n_epochs=500,
        publish="epoch",
        precision="bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32",
        device_kind="cpu",
    )


def copy_s(nbytes: int) -> float:
    """Fastest of three warm copies, one thread."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = []
    for _ in range(3):
        began_s = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def measure(size: str, zero: int, rounds: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="bench-"))
    bench = Bench(folder)
    try:
        found = asyncio.run(bench.run(spec_of(folder, disk, size, zero), rounds))
    finally:
        bench.close()
        shutil.rmtree(folder)
        shutil.rmtree(disk)
    rows = [
        stated("training waits for a snapshot", size, 1e3 * found["snapshot_stall_s"], "ms"),
        stated("training waits for a version", size, 1e3 * found["publish_stall_s"], "ms"),
    ]
    copied_s = copy_s(found["4 to 4"].state_bytes)
    for way, moves in found.items():
        if not isinstance(moves, Moves):
            continue
        suspend_s, ready_s, step_s = map(statistics.median, (moves.suspend_s, moves.ready_s, moves.step_s))
        rows += [
            at_most(f"suspend over one copy of the state, ranks {way}", size, suspend_s / copied_s, "x", 1.5),
            stated(f"suspend and resume until all train, ranks {way}", size, suspend_s + ready_s, "s"),
            stated(f"suspend and resume to the end of the next step, ranks {way}", size, suspend_s + step_s, "s"),
            stated(f"until the ranks have left their step, {way}", size, 1e3 * statistics.median(moves.agree_s), "ms"),
        ]
    for row in rows:
        print(f"{size}: {row['claim']}: {row['measured']:.3g} {row['unit']} (aim {row['aim']})", flush=True)
    record(__file__, rows)
    plain = {name: asdict(value) if isinstance(value, Moves) else value for name, value in found.items()}
    return {"size": size, "zero": zero, "copy_s": copied_s, **plain}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "50M"])
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument(
        "--rounds", type=int, default=5, help="suspensions at the same size, of which the median counts"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = [measure(size, options.zero, options.rounds) for size in options.sizes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
