"""Measures how long a run takes to suspend, to resume at the same and at another size, to snapshot and to publish.

    python -m benchmarks.suspend_resume [--sizes 5M 25M] [--zero 2] [--rounds 5]

Worlds of 4 and then of 8 ranks train a random Llama in short steps. Each world is suspended (`Group.suspend`), and
resumed until its first step ends: at the same size, finally at half. Suspensions are compared with a copy of the state.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._claims import Claim, at_most, parser, record, stated
from benchmarks._machine import SIZES, copy_s, native_dtype
from tests.e2e.engine_support import save_model
from tests.train_support.world import WarmTrain
from train.control.group import Group, PingLimits, RankHost
from train.data_checks.process import checked
from train.plan.spec import TrainSpec

LIMITS = PingLimits(ping_timeout_s=60.0)
EXAMPLES = 36  # nine steps per epoch; each epoch ends with a published version
STEPS = 20  # steps of the world of 4 before its first suspension


class World:
    """Runs one world of ranks, and records its events with arrival times."""

    def __init__(self, warm: WarmTrain, spec: TrainSpec) -> None:
        self.warm, self.spec, self.events, self._news = warm, spec, [], asyncio.Event()
        self.group = Group(self._note)

    def _note(self, event: dict) -> None:
        self.events.append((time.monotonic(), event))
        self._news.set()

    async def start(self, size: int, snapshot: str | None = None) -> World:
        self.began_s = time.monotonic()
        hosts = [RankHost(str(self.warm.socket), str(self.warm.folder), limits=LIMITS) for _ in range(size)]
        await self.group.start(self.spec, hosts, ["cpu"] * size, snapshot)
        self.ready_s = time.monotonic() - self.began_s
        return self

    async def stepped(self, count: int) -> float:
        """Return the seconds from the world's start to the end of its `count`-th step."""
        while len(steps := [at_s for at_s, event in self.events if event["event"] == "metrics"]) < count:
            assert all(event["event"] != "finished" for _, event in self.events), self.events[-1]
            self._news.clear()
            await self._news.wait()
        return steps[count - 1] - self.began_s

    def stall_ms(self, kind: str) -> float:
        return 1e3 * statistics.median(event["seconds"] for _, event in self.events if event["event"] == kind)


async def moved(world: World, size: str, start: int, rounds: int) -> list[Claim]:
    """Suspend and resume a world `rounds` times at the same size, then once at half its size."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for ranks in [start] * rounds + [start // 2]:
        report = await world.group.suspend()
        assert report is not None
        world = await World(world.warm, world.spec).start(ranks, report.snapshot_path)
        suspend_s = report.seconds["snapshot"] + report.seconds["exit"]
        times = report.seconds["agree"], suspend_s, suspend_s + world.ready_s, suspend_s + await world.stepped(1)
        await world.stepped(3)
        found.setdefault(f"{start} to {ranks}", []).append(times)
    await world.group.kill()
    rows, copied_s = [], copy_s(report.bytes)
    for way, all_times in found.items():
        agree_s, suspend_s, ready_s, step_s = (statistics.median(column) for column in zip(*all_times, strict=True))
        rows += [
            at_most(f"suspend over one copy of the state, ranks {way}", size, suspend_s / copied_s, "x", 1.5),
            stated(f"suspend and resume until all train, ranks {way}", size, ready_s, "s"),
            stated(f"suspend and resume to the end of the next step, ranks {way}", size, step_s, "s"),
            stated(f"until the ranks have left their step, {way}", size, 1e3 * agree_s, "ms"),
        ]
    return rows


async def measure(warm: WarmTrain, spec: TrainSpec, size: str, rounds: int) -> list[Claim]:
    world = await World(warm, dataclasses.replace(spec, snapshot_every_s=0.5)).start(4)
    await world.stepped(STEPS)
    rows = [
        stated("training waits for a snapshot", size, world.stall_ms("snapshot"), "ms"),
        stated("training waits for a version", size, world.stall_ms("published"), "ms"),
        *await moved(world, size, 4, rounds),
    ]
    eight = dataclasses.replace(spec, batch_size=8, job_id="eight", run_dir=f"{spec.run_dir}8")
    world = await World(warm, eight).start(8)
    await world.stepped(3)
    return rows + await moved(world, size, 8, rounds)


def spec_of(shm: Path, disk: Path, size: str, zero: int) -> TrainSpec:
    save_model(shm / "model", seed=1, max_position_embeddings=2048, **SIZES[size])
    with open(shm / "upload.jsonl", "w") as file:
        for number in range(EXAMPLES):
            answer = " ".join(map(str, range(number % 60))) + " done"
            messages = [{"role": "user", "content": f"count to {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    how = {"chat_path": shm / "chat.jsonl", "method": "supervised", "tokenizer": shm / "model"}
    assert checked(shm / "upload.jsonl", **how).ok
    return TrainSpec(
        job_id="four",
        base_path=str(shm / "model"),
        train_path=str(shm / "chat.jsonl"),
        run_dir=str(disk / "run"),
        shm_root=str(shm / "store"),
        output_model="ft:bench",
        max_length=32,
        batch_size=4,
        packing=False,
        zero_stage=zero,
        snapshot_every_s=0.0,
        n_epochs=500,
        publish="epoch",
        precision="bf16" if native_dtype() == "bfloat16" else "fp32",
        device_kind="cpu",
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "25M"])
    options.add_argument("--zero", type=int, choices=(1, 2, 3), default=2)
    options.add_argument("--rounds", type=int, default=5, help="suspensions at the same size; results are medians")
    given = options.parse_args()
    warm = WarmTrain().wait()
    try:
        for size in given.sizes:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as disk:
                spec = spec_of(Path(shm), Path(disk), size, given.zero)
                record(__file__, asyncio.run(measure(warm, spec, size, given.rounds)))
    finally:
        warm.close()


if __name__ == "__main__":
    main()
