"""Compares the publish rate of the weight store with the memcpy rate for the same bytes and threads, in one run.

    python -m benchmarks.publish_rate [--sizes-mb 10 100 1000] [--threads 1 2] [--rounds 7]

A publish reserves, writes every tensor and commits without checksums (the copy on disk has them). It reuses the segment
of an older version that this process has mapped before, like a trainer that publishes repeatedly. Each thread writes a
contiguous share, like a ZeRO rank. Copies and publishes alternate, so that drift of the machine affects both rates.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks._claims import Claim, at_least, parser, record
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

LAYERS, VOCABULARY = 16, 8192


def llama_specs(total_bytes: int) -> list[TensorSpec]:
    """Return the BF16 tensors of a 16-layer Llama with about `total_bytes` bytes."""
    hidden = 64
    while 2 * (VOCABULARY + LAYERS * 13 * (hidden + 64)) * (hidden + 64) <= total_bytes:
        hidden += 64
    shapes = {"embed_tokens": (VOCABULARY, hidden)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"layers.{layer}.mlp.{name}_proj": (3 * hidden, hidden) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.mlp.down_proj": (hidden, 3 * hidden)}
        shapes |= {f"layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return [TensorSpec(f"model.{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def share(specs: list[TensorSpec], rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Return (tensor, start, stop), in bytes, for a rank's share of the concatenated tensors, as with ZeRO-1 and 2."""
    total_bytes, begin = sum(spec.nbytes for spec in specs), 0
    for spec in specs:
        start = max(total_bytes * rank // ranks - begin, 0)
        stop = min(total_bytes * (rank + 1) // ranks - begin, spec.nbytes)
        if start < stop:
            yield spec.name, start, stop
        begin += spec.nbytes


def measure(root: Path, total_bytes: int, threads: int, rounds: int) -> Claim:
    specs, store = llama_specs(total_bytes), WeightStore(root, budget_bytes=None)
    layout, generator = Layout.plan(specs), np.random.default_rng(0)
    sources = {spec.name: generator.integers(0, 255, spec.nbytes, dtype=np.uint8) for spec in specs}
    mapped = {name: array.copy() for name, array in sources.items()}
    shares = [list(share(specs, rank, threads)) for rank in range(threads)]

    def copy(targets: dict[str, np.ndarray]) -> None:
        def one(parts: list[tuple[str, int, int]]) -> None:
            for name, start, stop in parts:
                np.copyto(targets[name][start:stop], sources[name][start:stop])

        list(pool.map(one, shares))

    def copied_s() -> float:
        began_s = time.perf_counter()
        copy(mapped)
        return time.perf_counter() - began_s

    def published_s() -> float:
        began_s = time.perf_counter()
        draft = store.reserve(layout, kind="version", model="bench", version=str(time.monotonic_ns()))
        copy({name: np.frombuffer(draft.view(name), np.uint8) for name in sources})
        stored = draft.commit(meta={})
        took_s = time.perf_counter() - began_s
        store.remove(stored)
        return took_s

    with ThreadPoolExecutor(threads) as pool:
        published_s()  # leaves a mapped segment in the pool
        ratios = [copied_s() / published_s() for _ in range(rounds)]
    store.pool.trim(0)
    size = f"{sum(map(len, sources.values())) / 1e6:.0f} MB, {threads} thread{'s' * (threads > 1)}"
    return at_least("publish over memcpy with the same threads", size, statistics.median(ratios), "x", 0.9)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes-mb", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    for megabytes in given.sizes_mb:
        for threads in given.threads:
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="publish-rate-") as root:
                record(__file__, [measure(Path(root), megabytes * 10**6, threads, given.rounds)])


if __name__ == "__main__":
    main()
