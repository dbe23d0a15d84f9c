"""Bytes and rates of the tiers on really trained state.

    python benchmarks/tiers.py [--sizes 5m 50m] [--steps 8] [--lora-rank 8] [--disk DIR] [--json FILE]

A LoRA job and a full fine-tune of the same random Llama each train for `--steps` steps, write a snapshot, train on for
one step and write another, through the project's own train package in a process of their own. Then:

- incremental: bytes that the second snapshot of the LoRA job adds to a packed tier, against a full checkpoint (serving
  weights, fp32 master and two moments of every parameter) and against what DeepSpeed's `save_checkpoint` writes for the
  very same LoRA job;
- compression: stored bytes and rate of packing the full job's snapshot and its bf16 weights, and of reading them back;
- persist: rate of the background copy of a version to a plain directory, against a copy of the same bytes with sync.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._claims import at_most, record, stated
from benchmarks.suspend_resume import SIZES, _prepare
from weights.memory.store import WeightStore
from weights.tiers.directory import DirectoryTier
from weights.tiers.objects import DirectoryObjects
from weights.tiers.packed import PackedTier
from weights.tiers.record import Name

BYTES_PER_PARAMETER = 2 + 4 + 4 + 4


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5m", "50m"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="directory on the disk to be measured")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _train(options)
    results = [_measured(size, options) for size in options.sizes]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _measured(size: str, options: argparse.Namespace) -> dict[str, Any]:
    shm = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=options.disk))
    try:
        result = _measure(shm, disk, size, options)
    finally:
        shutil.rmtree(shm)
        shutil.rmtree(disk)
    print(json.dumps(result, indent=2), flush=True)
    _record(result)
    return result


def _measure(shm: Path, disk: Path, size: str, options: argparse.Namespace) -> dict[str, Any]:
    import dataclasses

    options.zero, options.tokens, options.precision = 1, 64, None
    spec = dataclasses.replace(_prepare(shm, disk, size, options), batch_size=2, keep_snapshots=2)
    told = {}
    for job, full in (("lora", False), ("full", True)):
        mine = dataclasses.replace(spec, job_id=job, output_model=f"ft:{job}", full=full, lora_rank=options.lora_rank)
        done = subprocess.run(
            [sys.executable, __file__, "--child", mine.to_json(), "--disk", str(disk), "--steps", str(options.steps)],
            env={
                **os.environ,
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "GLOO_SOCKET_IFNAME": "lo",
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        told[job] = json.loads(done.stdout.strip().splitlines()[-1])
    store = WeightStore(shm / "store", budget_bytes=None)
    return {
        "size": size,
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "parameters": told["full"]["parameters"],
        "lora_rank": options.lora_rank,
        "incremental": _incremental(store, disk, told, "zstd") | {"int8": _incremental(store, disk, told, "int8")},
        "snapshot": _compression(store, disk, Name("snapshot", "full", f"step-{options.steps}"), options.rounds),
        "version": _compression(store, disk, Name("version", "ft:full", "result"), options.rounds),
        "persist": _persist(store, disk, Name("version", "ft:full", "result"), options.rounds),
    }


def _tier(disk: Path, kind: str) -> PackedTier:
    """An empty tier: "zstd" or "int8" (moments quantised)."""
    home = disk / f"tier-{kind}"
    shutil.rmtree(home, ignore_errors=True)
    return PackedTier(kind, DirectoryObjects(home, create=True), int8_moments=kind == "int8")


def _incremental(store: WeightStore, disk: Path, told: dict[str, Any], kind: str) -> dict[str, Any]:
    tier = _tier(disk, kind)
    first, second = (stored for stored in store.list("snapshot") if stored.model == "lora")
    tier.put(first.path)
    added = tier.put(second.path)
    full = told["full"]["parameters"] * BYTES_PER_PARAMETER
    return {
        "snapshot_bytes": second.nbytes,
        "written_bytes": added,
        "full_checkpoint_bytes": full,
        "share_of_full_checkpoint": added / full,
        "deepspeed_checkpoint_bytes": told["lora"]["checkpoint_bytes"],
        "share_of_deepspeed_lora_checkpoint": added / told["lora"]["checkpoint_bytes"],
    }


def _compression(store: WeightStore, disk: Path, name: Name, rounds: int) -> dict[str, Any]:
    stored = store.find(*name)
    assert stored is not None, name
    stored = store.seal(stored)
    scratch = WeightStore(disk / "scratch", budget_bytes=None)
    seconds: dict[str, list[float]] = {}
    sizes = {}
    for _ in range(rounds):
        for kind in ("zstd", *(["int8"] if name.kind == "snapshot" else [])):
            tier = _tier(disk, kind)
            started = time.perf_counter()
            sizes[kind] = tier.put(stored.path)
            seconds.setdefault(f"pack_{kind}", []).append(time.perf_counter() - started)
            started = time.perf_counter()
            again = tier.restore(scratch, name)
            seconds.setdefault(f"restore_{kind}", []).append(time.perf_counter() - started)
            scratch.remove(again)
            scratch.trim_pool(0)
    rates = {f"{what}_bytes_s": stored.nbytes / statistics.median(found) for what, found in seconds.items()}
    ratios = {f"ratio_{kind}": stored.nbytes / size for kind, size in sizes.items()}
    return {"bytes": stored.nbytes, **ratios, **rates}


def _persist(store: WeightStore, disk: Path, name: Name, rounds: int) -> dict[str, Any]:
    stored = store.find(*name)
    assert stored is not None
    ours, plain = [], []
    for _ in range(rounds):
        tier = DirectoryTier("disk", disk / "models")
        started = time.perf_counter()
        tier.put(stored.path)
        ours.append(time.perf_counter() - started)
        tier.remove(name)
        started = time.perf_counter()
        shutil.copyfile(stored.path / "model.safetensors", disk / "plain")
        with open(disk / "plain", "rb") as file:
            os.fsync(file.fileno())
        plain.append(time.perf_counter() - started)
        (disk / "plain").unlink()
    mine, theirs = statistics.median(ours), statistics.median(plain)
    return {"bytes": stored.nbytes, "bytes_s": stored.nbytes / mine, "rate_over_plain_copy": theirs / mine}


def _train(options: argparse.Namespace) -> int:
    """In a process of its own: train, snapshot, one more step, snapshot, publish; DeepSpeed's own checkpoint."""
    from train.control.progress import ControlSignals, Progress
    from train.plan.spec import TrainSpec
    from train.run.engine import init_world, meeting_url
    from train.run.prepare import prepare
    from train.state import publish, snapshot

    spec = TrainSpec.from_json(options.child)
    init_world("cpu", meeting_url(Path(options.disk) / f"meeting-{os.getpid()}"))
    run = prepare(spec, lambda event, **data: None, ControlSignals(), Progress())
    for _ in range(options.steps):
        run._one_step(run.plan.total_steps)
    snapshot.begin_snapshot(run.engine, spec, run.store, run.saving.layout, options.steps).finish()
    run._one_step(run.plan.total_steps)
    snapshot.begin_snapshot(run.engine, spec, run.store, run.saving.layout, options.steps + 1).finish()
    if spec.full:
        publish.begin_publish(run.engine, spec, run.store, version="result", meta={}, pace_s=None).finish()
    folder = Path(options.disk) / f"deepspeed-{spec.job_id}"
    run.engine.save_checkpoint(str(folder))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.module.parameters())
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"parameters": parameters, "checkpoint_bytes": nbytes}), flush=True)
    return 0


def _record(result: dict[str, Any]) -> None:
    size, found = result["size"], result["incremental"]
    rows = [
        at_most(
            "incremental checkpoint of a LoRA job over a full checkpoint",
            size,
            100 * found["share_of_full_checkpoint"],
            "%",
            2,
        ),
        stated(
            "the same over DeepSpeed's checkpoint of that LoRA job",
            size,
            100 * found["share_of_deepspeed_lora_checkpoint"],
            "%",
        ),
        stated("lossless ratio on a snapshot (fp32 master and moments)", size, result["snapshot"]["ratio_zstd"], "x"),
        stated("lossless ratio on bf16 weights", size, result["version"]["ratio_zstd"], "x"),
        stated("background persist over a plain synced copy", size, result["persist"]["rate_over_plain_copy"], "x"),
    ]
    record(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
