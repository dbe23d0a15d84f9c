"""Publish rate of the weight store over the memcpy rate of the same bytes with the same threads, in one run.

    python benchmarks/publish_rate.py [--sizes-mb 10 100 1000] [--threads 1 2] [--rounds 7] [--json FILE]

One publish = reserve + write every tensor + commit without checksums (the copy on disk has them). "steady"
re-uses the segment of an older version that this process has mapped before, as a trainer that publishes again
and again; "reused" re-uses a segment this process has not mapped; "new" takes memory the system has to clear
first. Sources and tensor shapes are those of a Llama-like model; each thread writes its contiguous share, as a ZeRO
rank does.
Rounds of all cases alternate, so that drift of the machine meets all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._claims import at_least, record
from weights.format.layout import Layout, TensorSpec
from weights.memory.segment import forget_mappings
from weights.memory.store import WeightStore

LAYERS = 16
VOCABULARY = 8192


def llama_specs(total_bytes: int) -> list[TensorSpec]:
    """BF16 tensors of a Llama with 16 layers whose hidden size makes it about `total_bytes` large."""
    hidden = 64
    while model_bytes(hidden + 64) <= total_bytes:
        hidden += 64
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (VOCABULARY, hidden))]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        specs += [TensorSpec(f"{prefix}self_attn.{name}_proj.weight", "BF16", (hidden, hidden)) for name in "qkvo"]
        specs += [
            TensorSpec(f"{prefix}mlp.{name}_proj.weight", "BF16", (3 * hidden, hidden)) for name in ("gate", "up")
        ]
        specs += [TensorSpec(f"{prefix}mlp.down_proj.weight", "BF16", (hidden, 3 * hidden))]
        specs += [
            TensorSpec(f"{prefix}{name}_layernorm.weight", "BF16", (hidden,)) for name in ("input", "post_attention")
        ]
    return [*specs, TensorSpec("model.norm.weight", "BF16", (hidden,))]


def model_bytes(hidden: int) -> int:
    return 2 * (VOCABULARY * hidden + LAYERS * (13 * hidden * hidden + 2 * hidden) + hidden)


def copy_all(sources: dict, targets: dict, shares: list, pool: ThreadPoolExecutor) -> None:
    """Every thread copies its share of every tensor; returns when all are done."""

    def one(share):
        for name, start, stop in share:
            np.copyto(targets[name][start:stop], sources[name][start:stop])

    for done in [pool.submit(one, share) for share in shares]:
        done.result()


def _share(specs: list[TensorSpec], rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, start, stop) in bytes of what a rank owns of the tensors laid end to end, as under ZeRO-1 and 2."""
    total_bytes, begin = sum(spec.nbytes for spec in specs), 0
    for spec in specs:
        start = max(total_bytes * rank // ranks - begin, 0)
        stop = min(total_bytes * (rank + 1) // ranks - begin, spec.nbytes)
        if start < stop:
            yield spec.name, start, stop
        begin += spec.nbytes


class Bench:
    """The cases for one size and thread count; each returns the seconds it took."""

    def __init__(self, root: Path, total_bytes: int, threads: int) -> None:
        self.store = WeightStore(root, budget_bytes=None)
        specs = llama_specs(total_bytes)
        self.layout = Layout.plan(specs)
        self.pool = ThreadPoolExecutor(threads)
        random = np.random.default_rng(0)
        self.sources = {spec.name: random.integers(0, 255, spec.nbytes, dtype=np.uint8) for spec in specs}
        self.warm = {name: array.copy() for name, array in self.sources.items()}
        self.shares = [list(_share(specs, rank, threads)) for rank in range(threads)]
        self.count = 0

    def memcpy(self) -> float:
        started_s = time.perf_counter()
        copy_all(self.sources, self.warm, self.shares, self.pool)
        return time.perf_counter() - started_s

    def steady(self) -> float:
        self._publish()  # leaves a mapped segment in the pool
        return self._publish()

    def reused(self) -> float:
        self._publish()
        forget_mappings()
        return self._publish()

    def new(self) -> float:
        self._empty()
        return self._publish()

    def checked(self) -> float:
        self._publish()
        return self._publish(checksums=True)

    def _empty(self) -> None:
        self.store.trim_pool()
        forget_mappings()

    def _publish(self, *, checksums: bool = False) -> float:
        started_s = time.perf_counter()
        self.count += 1
        draft = self.store.reserve(self.layout, kind="version", model="bench", version=str(self.count))
        targets = {name: np.frombuffer(draft.view(name), np.uint8) for name in self.sources}
        copy_all(self.sources, targets, self.shares, self.pool)
        del targets
        stored = draft.commit(meta={}, checksums=checksums)
        seconds = time.perf_counter() - started_s
        self.store.remove(stored)
        return seconds


CASES = ("memcpy", "steady", "reused", "new", "checked")


def measure(root: Path, total_bytes: int, threads: int, rounds: int) -> dict:
    """Median seconds of every case, and its rate over memcpy's, for one size and thread count."""
    bench = Bench(root, total_bytes, threads)
    runs: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            call: Callable[[], float] = getattr(bench, case)
            runs[case].append(call())
    nbytes = sum(array.nbytes for array in bench.sources.values())
    bench.pool.shutdown()
    bench._empty()
    seconds = {case: statistics.median(times) for case, times in runs.items()}
    return {
        "bytes": nbytes,
        "tensors": len(bench.sources),
        "threads": threads,
        "memcpy_gb_s": nbytes / seconds["memcpy"] / 1e9,
        "seconds": seconds,
        "ratio_to_memcpy": {case: seconds["memcpy"] / seconds[case] for case in CASES if case != "memcpy"},
    }


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    results = []
    print(f"{'MB':>6} {'threads':>7} {'memcpy GB/s':>12}  ratio to memcpy: " + " ".join(f"{c:>8}" for c in CASES[1:]))
    for megabytes in arguments.sizes_mb:
        for threads in arguments.threads:
            with tempfile.TemporaryDirectory(dir=arguments.root, prefix="publish-rate-") as root:
                result = measure(Path(root), megabytes * 10**6, threads, arguments.rounds)
            results.append(result)
            ratios = " ".join(f"{result['ratio_to_memcpy'][case]:8.2f}" for case in CASES[1:])
            print(
                f"{result['bytes'] / 1e6:6.0f} {threads:7d} {result['memcpy_gb_s']:12.1f}  {'':16} {ratios}", flush=True
            )
    record(
        __file__,
        (
            at_least(
                "publish over memcpy with the same threads, segment used again",
                f"{result['bytes'] / 1e6:.0f} MB, {result['threads']} thread{'s' * (result['threads'] > 1)}",
                result["ratio_to_memcpy"]["steady"],
                "x",
                0.9,
            )
            for result in results
        ),
    )
    if arguments.json:
        machine = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
