"""Swap, wake and start of an engine against a copy of its weights, all in one run on one machine.

    python benchmarks/engine_swap.py [--sizes 5M,50M,200M] [--rounds N] [--dtype TYPE] [--json FILE]

Per model size (random Llama), on the CPU engine with one thread (a load in place has one per core), in bfloat16 where
the machine multiplies it and else in float32:

    memcpy          one warm copy of all weight bytes, one thread: the limit
    swap            `pause` as the engine reports it (no step under way nor begun), and `gap` as
                    a streaming client sees it (longest time between two chunks around the swap, less the usual one),
                    and for comparison in the stream's chunks `before` the swap, which is the machine's noise. The
                    client also waits for its own tokens so far to be computed again with the new weights: `recompute`
                    is what a fresh prompt of that many tokens takes, less a usual step
    fork start      a new engine forked from the warm parent, to its first token
    wake            a sleeping engine to its first token, from shared memory
    sleepers        three engines: resident memory awake and asleep, and the time of a wake, one of
                    them with a version it meets for the first time

The machine is shared and noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import Claim, at_most, record, stated  # noqa: E402 - the path comes first
from benchmarks._models import SIZES  # noqa: E402
from serve.engine.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, client  # noqa: E402
from weights.format.layout import Layout, TensorSpec  # noqa: E402
from weights.format.torch_views import dtype_code  # noqa: E402

BEGAN_S = time.perf_counter()
WARM_ROUNDS = 1
PHASES = ("seconds", "pause_s", "load_s")
ROOM_BYTES = 12  # of free memory per byte of weights: two versions, what makes them, an engine, a server
STREAM_TOKENS = 1500
KV_CACHE_BYTES = 256 * 2**20  # one stream of the largest model in float32, and as much again
SLEEPERS = 3


def memcpy_seconds(path: Path, rounds: int) -> float:
    """Fastest of several warm copies of all weight bytes, one thread."""
    import torch

    torch.set_num_threads(1)
    data = torch.frombuffer(bytearray((path / "model.safetensors").read_bytes()), dtype=torch.uint8)
    target = torch.empty_like(data).fill_(0)
    seconds = []
    for _ in range(rounds + 2):
        began_s = time.perf_counter()
        target.copy_(data)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


async def gap_around(replica: Replica, sdk, model: str, version: Path) -> dict:
    """What a stream sees of one swap, in seconds, and the engine's own report of it."""
    arrivals: list[float] = []

    async def read() -> None:
        stream = await sdk.completions.create(
            model=model,
            prompt=[7, 8, 9],
            max_tokens=STREAM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            arrivals.append(time.perf_counter())

    reading = asyncio.create_task(read())
    while len(arrivals) < 60:
        await asyncio.sleep(0.001)
    began_s = time.perf_counter()
    report = await replica.swap(model, version.name, str(version))
    after = len(arrivals)
    if reading.done():
        raise RuntimeError("the stream ended before the swap did; the machine is too busy to measure it")
    while len(arrivals) < min(after + 15, STREAM_TOKENS) and not reading.done():
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    waits = [(start, end - start) for start, end in zip(arrivals, arrivals[1:], strict=False)]
    usual_s = statistics.median(wait for start, wait in waits if start < began_s)
    return {
        **{key: report[key] for key in PHASES},
        "gap_s": max(wait for start, wait in waits[20:]) - usual_s,
        "before_gap_s": max(wait for start, wait in waits[20:] if start + wait < began_s) - usual_s,
        "usual_s": usual_s,
        "tokens": 3 + after,
    }


async def recompute_s(sdk, model: str, tokens: int, usual_s: float) -> float:
    """Seconds that a prompt of so many tokens takes beyond a usual step; median of three, none cached."""
    seconds = []
    for turn in range(3):
        prompt = [(turn * 31 + 11 * index) % 350 + 10 for index in range(tokens)]
        began_s = time.perf_counter()
        await sdk.completions.create(model=model, prompt=prompt, max_tokens=1)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds) - usual_s


async def sleepers(box: Box, size: str, versions: list[Path], dtype: str) -> dict:
    """Several engines asleep at once."""
    replicas, before, after, wakes = [], 0, 0, []
    try:
        for number in range(SLEEPERS):
            replica = Replica(str(box.warm_socket), str(box.logs))
            replicas.append(replica)
            await replica.start(box.spec(f"sleeper-{number}", versions[0], kv_cache_bytes=KV_CACHE_BYTES, dtype=dtype))
            asleep = await replica.sleep()
            before, after = before + asleep["rss_before_bytes"], after + asleep["rss_after_bytes"]
        for number, replica in enumerate(replicas):
            path = versions[number % 2]
            woken = await replica.wake("starter", path.name, str(path))
            wakes.append(woken["seconds"])
            await replica.sleep()
        return {"engines": SLEEPERS, "awake_bytes": before, "asleep_bytes": after, "wake_s": statistics.median(wakes)}
    finally:
        for replica in replicas:
            await replica.stop()


async def first_token(sdk, model: str) -> None:
    await sdk.completions.create(model=model, prompt="the", max_tokens=1)


async def own_engine(box: Box, size: str, versions: list[Path], rounds: int, dtype: str) -> dict:
    spec = box.spec(f"bench-{size}", versions[0], kv_cache_bytes=KV_CACHE_BYTES, dtype=dtype)
    sdk = client(spec)
    found: dict = {"swap": {}, "fork_start_s": [], "wake_s": []}
    for _ in range(rounds):
        replica = Replica(str(box.warm_socket), str(box.logs))
        began_s = time.perf_counter()
        await replica.start(spec)
        await first_token(sdk, spec.model)
        found["fork_start_s"].append(time.perf_counter() - began_s)
        await replica.stop()
        sdk = client(spec)
    replica = Replica(str(box.warm_socket), str(box.logs))
    await replica.start(spec)
    try:
        progress(f"{size}: swaps")
        seen = []
        for turn in range(WARM_ROUNDS + rounds):
            one = await gap_around(replica, sdk, spec.model, versions[(turn + 1) % 2])
            one["recompute_s"] = await recompute_s(sdk, spec.model, one["tokens"], one["usual_s"])
            seen.append(one)
        found["swap"] = middle(seen[WARM_ROUNDS:])
        for _ in range(rounds):
            found["asleep"] = await replica.sleep()
            began_s = time.perf_counter()
            await replica.wake(spec.model, versions[0].name, str(versions[0]))
            await first_token(sdk, spec.model)
            found["wake_s"].append(time.perf_counter() - began_s)
    finally:
        await replica.stop()
    for key in ("fork_start_s", "wake_s"):
        found[key] = statistics.median(found[key])
    return found


def middle(seen: list[dict]) -> dict:
    return {key: statistics.median(one[key] for one in seen) for key in seen[0]}


def table(results: dict) -> str:
    lines = []
    for size, row in results["sizes"].items():
        memcpy = row["memcpy_s"]
        lines.append(f"\n{size}: {row['bytes'] / 1e6:.0f} MB, memcpy {memcpy * 1e3:.1f} ms")
        swap = row["swap"]
        lines.append(
            f"  swap: client gap {swap['gap_s'] * 1e3:7.1f} ms "
            f"(before {swap['before_gap_s'] * 1e3:.1f}), "
            f"pause {swap['pause_s'] * 1e3:7.1f} ms "
            f"= {swap['pause_s'] / memcpy:5.2f} x memcpy (load {swap['load_s'] * 1e3:.1f} ms), "
            f"all {swap['seconds'] * 1e3:.1f} ms; step {swap['usual_s'] * 1e3:.1f} ms, "
            f"recompute {swap['tokens']:.0f} tokens {swap['recompute_s'] * 1e3:.1f} ms"
        )
        lines.append(f"  fork start to first token {row['fork_start_s']:.2f} s, wake {row['wake_s'] * 1e3:.0f} ms")
        if "sleepers" in row:
            several = row["sleepers"]
            lines.append(
                f"  {several['engines']} engines: {several['awake_bytes'] / 1e6:.0f} MB awake, "
                f"{several['asleep_bytes'] / 1e6:.0f} MB asleep; each woke in "
                f"{several['wake_s'] * 1e3:.0f} ms"
            )
        asleep = row["asleep"]
        lines.append(
            f"  memory {asleep['rss_before_bytes'] / 1e6:.0f} -> {asleep['rss_after_bytes'] / 1e6:.0f} MB asleep, "
            f"in {asleep['seconds'] * 1e3:.0f} ms"
        )
    return "\n".join(lines)


def claims(size: str, row: dict) -> list[Claim]:
    """This size's lines of the table that `make bench` ends with."""
    in_place, memcpy = row["swap"], row["memcpy_s"]
    asleep = row["asleep"]
    return [
        at_most("swap: pause less 50 ms", size, (in_place["pause_s"] - 0.05) / memcpy, "x memcpy", 3),
        stated("forked engine to its first token", size, row["fork_start_s"], "s"),
        stated("sleeping engine to its first token", size, row["wake_s"], "s"),
        stated("sleeping engine's memory", size, asleep["rss_after_bytes"] / asleep["rss_before_bytes"], "of awake"),
    ]


def native_dtype() -> str:
    """bfloat16 where the processor multiplies it; elsewhere vLLM is many times slower in it than in float32."""
    import torch

    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def stored_as(path: Path, dtype: str) -> Path:
    """The version as a box publishes it: its tensors in what the engine computes in, so that bytes read are bytes held,
    and what engines fuse side by side (train.state.publish)."""
    import torch
    from safetensors.torch import load_file

    file, unfinished = path / "model.safetensors", path / "model.safetensors.unfinished"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    order = sorted(tensors, key=lambda name: [name.rsplit(".", 2)[0], "qkvogud".find(name.rsplit(".", 2)[1][0])])
    code = dtype_code(getattr(torch, dtype))
    layout = Layout.plan([TensorSpec(name, code, tuple(tensors[name].shape)) for name in order])
    with open(
        unfinished, "wb"
    ) as stream:  # the tensors that keep their type are read from the file as they are written
        stream.write(layout.file(file.name).header)
        for placed in layout:
            stream.seek(placed.start)
            stream.write(tensors[placed.spec.name].contiguous().view(torch.uint8).numpy())
    unfinished.rename(file)
    return path


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN_S:5.0f} s] {text}", file=sys.stderr, flush=True)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="5M,50M,200M", help=f"comma list of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="what the engines compute in")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = options.dtype or native_dtype()
    results = {
        "benchmark": "engine_swap",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: installed(name) for name in ("torch", "transformers", "openai")},
        "dtype": dtype,
        "sizes": {},
    }
    box = Box()
    try:
        for number, size in enumerate(options.sizes.split(",")):
            shape = {**SIZES[size], "initializer_range": 0.05, "max_position_embeddings": 2048}
            progress(f"{size}: two random versions")
            versions = [stored_as(box.version(f"{size}-{seed}", seed=seed, **shape), dtype) for seed in (1, 2)]
            weight_bytes = (versions[0] / "model.safetensors").stat().st_size
            if available_bytes() < ROOM_BYTES * weight_bytes:
                print(
                    f"{size}: left out, {available_bytes() / 1e9:.1f} GB of memory are free and "
                    f"{ROOM_BYTES * weight_bytes / 1e9:.1f} GB are needed"
                )
                continue
            row = {"bytes": weight_bytes, "memcpy_s": memcpy_seconds(versions[0], options.rounds)}
            progress(f"{size}: swaps, wakes and starts of our engine")
            row |= asyncio.run(own_engine(box, size, versions, options.rounds, dtype))
            if number == 0:
                progress(f"{size}: {SLEEPERS} engines asleep")
                row["sleepers"] = asyncio.run(sleepers(box, size, versions, dtype))
            results["sizes"][size] = row
            record(__file__, claims(size, row))
            for path in versions:
                shutil.rmtree(path)
    finally:
        box.close()
    print(f"engines compute in {dtype}")
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
