"""Compares the time to swap, wake and start an engine with the time to copy its weights, in one run on one machine.

    python -m benchmarks.engine_swap [--sizes 5M 50M 200M] [--rounds N] [--dtype TYPE]

Per model size (random Llama), on the CPU engine with one thread (one per core for a load in place), in bfloat16 if the
machine multiplies it natively, else in float32:

    pause           of a swap, as the engine reports it: no step runs or begins
    gap             of a swap, as a streaming client sees it: the longest time between two chunks around it, less the
                    usual one. The client also waits for its own tokens so far to be computed again
    start           a new engine forked from the warm parent, to its first token
    wake            a sleeping engine to its first token, from shared memory

The machine is shared and noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks._claims import Claim, at_most, parser, record, stated
from benchmarks._machine import SIZES, copy_s, native_dtype
from serve.engine.replica import Replica
from tests.e2e.engine_support import Box, client
from weights.format.layout import Layout, TensorSpec
from weights.format.torch_views import dtype_code

STREAM_TOKENS = 1500
KV_CACHE_BYTES = 256 * 2**20  # twice what one stream of the largest model needs in float32


async def gap_around(replica: Replica, sdk, model: str, version: Path) -> tuple[float, float]:
    """Swap once; return the pause that the engine reports, and the gap in a stream, in seconds."""
    arrivals: list[float] = []

    async def read() -> None:
        body = {"model": model, "prompt": [7, 8, 9], "max_tokens": STREAM_TOKENS, "temperature": 0}
        async for _ in await sdk.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
            arrivals.append(time.perf_counter())

    async def arrived(count: int) -> None:
        while len(arrivals) < min(count, STREAM_TOKENS) and not reading.done():
            await asyncio.sleep(0.001)

    reading = asyncio.create_task(read())
    await arrived(60)
    began_s = time.perf_counter()
    report = await replica.swap(model, version.name, str(version))
    if reading.done():
        raise RuntimeError("the stream ended before the swap did; the machine is too busy to measure it")
    await arrived(len(arrivals) + 15)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    waits = [(start_s, end_s - start_s) for start_s, end_s in zip(arrivals, arrivals[1:], strict=False)]
    usual_s = statistics.median(wait_s for start_s, wait_s in waits if start_s < began_s)
    return report["pause_s"], max(wait_s for _, wait_s in waits[20:]) - usual_s


@contextlib.asynccontextmanager
async def engine(box: Box, spec) -> AsyncIterator[Replica]:
    replica = Replica(str(box.warm_socket), str(box.logs))
    await replica.start(spec)
    try:
        yield replica
    finally:
        await replica.stop()


async def measure(box: Box, size: str, versions: list[Path], rounds: int, dtype: str) -> list[Claim]:
    spec = box.spec(f"bench-{size}", versions[0], kv_cache_bytes=KV_CACHE_BYTES, dtype=dtype)
    sdk, starts_s, swaps, wakes_s = client(spec), [], [], []

    async def to_first_token(began_s: float) -> float:
        await sdk.completions.create(model=spec.model, prompt="the", max_tokens=1)
        return time.perf_counter() - began_s

    for _ in range(rounds):
        began_s = time.perf_counter()
        async with engine(box, spec):
            starts_s.append(await to_first_token(began_s))
        sdk = client(spec)
    async with engine(box, spec) as replica:
        for turn in range(1 + rounds):
            swaps.append(await gap_around(replica, sdk, spec.model, versions[(turn + 1) % 2]))
        for _ in range(rounds):
            awake_bytes = (await replica.status())["rss_bytes"]
            await replica.sleep()
            asleep_bytes = (await replica.status())["rss_bytes"]
            began_s = time.perf_counter()
            await replica.wake(spec.model, versions[0].name, str(versions[0]))
            wakes_s.append(await to_first_token(began_s))
    weight_bytes = (versions[0] / "model.safetensors").stat().st_size
    copied_s = copy_s(weight_bytes)
    pause_s, gap_s = (statistics.median(column) for column in zip(*swaps[1:], strict=True))
    size = f"{size}, {weight_bytes / 1e6:.0f} MB in {dtype}"
    return [
        stated("memcpy of the weights", size, 1e3 * copied_s, "ms"),
        at_most("swap: pause less 50 ms", size, (pause_s - 0.05) / copied_s, "x memcpy", 3),
        stated("swap: pause", size, 1e3 * pause_s, "ms"),
        stated("swap: gap in a stream", size, 1e3 * gap_s, "ms"),
        stated("forked engine to its first token", size, statistics.median(starts_s), "s"),
        stated("sleeping engine to its first token", size, statistics.median(wakes_s), "s"),
        stated("sleeping engine's memory", size, asleep_bytes / awake_bytes, "of awake"),
    ]


def stored_as(path: Path, dtype: str) -> Path:
    """Store the version as a box publishes it: tensors in the engine's dtype, so that it reads as many bytes as it
    holds, and adjacent if engines fuse them (train.state.publish)."""
    file, unfinished = path / "model.safetensors", path / "model.safetensors.unfinished"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    order = sorted(tensors, key=lambda name: [name.rsplit(".", 2)[0], "qkvogud".find(name.rsplit(".", 2)[1][0])])
    code = dtype_code(getattr(torch, dtype))
    layout = Layout.plan([TensorSpec(name, code, tuple(tensors[name].shape)) for name in order])
    with open(unfinished, "wb") as out:  # tensors with unchanged dtype are still read from the old file
        out.write(layout.file(file.name).header)
        for placed in layout:
            out.seek(placed.start)
            out.write(tensors[placed.spec.name].contiguous().view(torch.uint8).numpy())
    unfinished.rename(file)
    return path


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "50M", "200M"])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), help="dtype of the engines")
    given = options.parse_args()
    dtype, box = given.dtype or native_dtype(), Box()
    try:
        for size in given.sizes:
            shape = {**SIZES[size], "initializer_range": 0.05, "max_position_embeddings": 2048}
            versions = [stored_as(box.version(f"{size}-{seed}", seed=seed, **shape), dtype) for seed in (1, 2)]
            record(__file__, asyncio.run(measure(box, size, versions, given.rounds, dtype)))
            for path in versions:
                shutil.rmtree(path)
    finally:
        box.close()


if __name__ == "__main__":
    main()
