"""Runs engines on one card with the box's own replicas: `python -m benchmarks.gpu.one_card.engines cuda [PART ...]`.

With captured graphs, a version must answer like a fresh engine after swaps in a pause, in place and layer by layer, and
after sleep and wake, for engines of one and two workers. Also tests kills, and adapters that share the slots of a
batch. Each line ends with "ok" or names the error. Engines run eagerly or with three captured graphs, never compiled.
Quantised versions are also compared with their decoded weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from runtime.processes.kernel import group_pids
from serve.core.config import EngineConfig
from serve.engine import replica as replica_module
from serve.engine.replica import Replica
from tests.e2e import quantised as formats
from tests.e2e.engine_support import Box, client, greedy_ids, stream_ids

KIND = sys.argv[1] if len(sys.argv) > 1 else "cuda"
MIB = 2**20
# Large enough for the kernels: heads of size 64, several KV heads; 30 MB of weights.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.06,
    "max_position_embeddings": 2048,
}
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4],
    "pass_config": {"fuse_allreduce_rms": False},
}
FOUR_BITS = ("w4a16", "awq", "gptq")
CONFIG = EngineConfig(start_timeout_s=150)
PART_TIMEOUT_S = 240


def args_of(*more: str) -> tuple[str, ...]:
    return ("--compilation-config", json.dumps(GRAPHS), *more) if KIND == "cuda" else more


def spec_of(box: Box, name: str, path: Path, more: tuple[str, ...] = (), **fields):
    fields = {"kind": KIND, "kv_cache_bytes": 512 * MIB, "gpu_memory_fraction": 0.2, "max_num_seqs": 8, **fields}
    return box.spec(name, path, extra_args=args_of(*more), **fields)


def alike(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextlib.asynccontextmanager
async def engine(box: Box, spec, entry: str | None = None):
    replica = Replica(str(box.warm_socket), str(box.logs), CONFIG)
    before = replica_module.ENTRY
    replica_module.ENTRY = entry or before
    began_s = time.monotonic()
    try:
        await replica.start(spec)
        replica_module.ENTRY = before
        print(f"  {spec.replica_id} started in {time.monotonic() - began_s:.0f} s", flush=True)
        yield replica, client(spec)
    except Exception as error:  # noqa: BLE001 - the other parts still tell
        print(f"{spec.replica_id}: WRONG: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
        log = box.logs / f"engine-{spec.replica_id}.log"
        print("\n".join(log.read_text().splitlines()[-25:]) if log.exists() else "", flush=True)
    finally:
        replica_module.ENTRY = before
        await replica.stop()


async def turns(box: Box, name: str, family: str, entry: str | None = None, **fields) -> None:
    """Load, sleep and wake two versions: each must answer like a fresh engine, with agreeing fingerprints. Expected:
    all counts of equal tokens are 30."""
    a, b = (box.version(f"{family}-{v}", family, seed=seed, **SHAPE) for v, seed in (("a", 1), ("b", 2)))
    await _turns(box, name, (a, b), entry, **fields)


async def quantised(box: Box, form: str, size: int = formats.GROUP, family: str = "llama") -> None:
    """Sleep and wake a quantised version, whose engine cannot swap to others. Count the tokens on which fresh engines
    of the quantised and the decoded weights agree (low-bit kernels round differently)."""
    versions, means = [], []
    for which, seed in (("a", 1), ("b", 2)):
        plain = box.version(f"{form}-{size}-{family}-plain-{which}", family, seed=seed, **SHAPE)
        versions.append(plain.with_name(f"{form}-{size}-{family}-{which}"))
        means.append(plain.with_name(f"{form}-{size}-{family}-means-{which}"))
        formats.write(plain, form, versions[-1], means[-1], size)
    asked, said = [[at, at + 10, at + 20, at + 30] for at in range(10, 18)], []
    for path in (means[1], versions[1]):
        async with engine(box, spec_of(box, f"{form}-{path.name[-7:]}", path)) as (_, sdk):
            said.append([await greedy_ids(sdk, "starter", ask, 30) for ask in asked])
    log = (box.logs / f"engine-{form}-{versions[1].name[-7:]}.log").read_text()
    print(f"{form}: computed by {sorted(set(re.findall(r'[A-Za-z0-9]+Kernel', log)))}", flush=True)
    equal = [alike(*both) for both in zip(*said, strict=True)]
    print(f"{form}: tokens of 30 equal to those of the decoded weights, in eight answers: {equal}", flush=True)
    async with engine(box, spec_of(box, form, versions[0])) as (replica, sdk):
        before = await greedy_ids(sdk, "starter", asked[0], 30)
        await replica.sleep()
        woken = await replica.wake("starter", versions[0].name, str(versions[0]))
        equal = alike(await greedy_ids(sdk, "starter", asked[0], 30), before)
        print(f"{form}: wake {woken['how']} in {1e3 * woken['seconds']:.0f} ms, {equal} of 30 tokens equal", flush=True)


async def _turns(box: Box, name: str, versions: tuple[Path, Path], entry: str | None, **fields) -> None:
    a, b = versions
    ask = [10, 20, 30, 40]
    async with engine(box, spec_of(box, f"{name}-b", b, **fields), entry) as (_, sdk):
        fresh_b = await greedy_ids(sdk, "starter", ask, 30)
    async with engine(box, spec_of(box, name, a, **fields), entry) as (replica, sdk):
        own = {a.name: await greedy_ids(sdk, "starter", ask, 30), b.name: fresh_b}
        again = [alike(await greedy_ids(sdk, "starter", ask, 30), own[a.name]) for _ in range(5)]
        # Humming's kernels sum in varying order: two answers of the same engine may differ.
        at_least = 28 if min(again) >= 28 else 1
        said = []
        for version in (b, a, b, a):
            report = await replica.swap("starter", version.name, str(version))
            equal = alike(await greedy_ids(sdk, "starter", ask, 30), own[version.name])
            said.append((report["how"], round(1e3 * report["pause_s"]), report["fingerprint"]["verdict"], equal))
        for version in (b, a):
            memory_bytes = used()
            await replica.sleep()
            asleep_bytes = used()
            woken = await replica.wake("starter", version.name, str(version))
            equal = alike(await greedy_ids(sdk, "starter", ask, 30), own[version.name])
            mb = (round(memory_bytes / 1e6), round(asleep_bytes / 1e6))
            said.append(
                (f"wake {woken['how']}", round(1e3 * woken["seconds"]), woken["fingerprint"]["verdict"], equal, mb)
            )
        # Under load, the stream must end with tokens of the new version and never be cut off.
        seen: list[int] = []
        streaming = asyncio.create_task(stream_ids(sdk, "starter", ask, 1500, seen))
        while len(seen) < 20:
            await asyncio.sleep(0.001)
        report = await replica.swap("starter", b.name, str(b))
        await streaming
        fine = len(seen) == 1500 and all(one[3] >= at_least for one in said)
        print(
            f"{name}: (how, pause ms, fingerprint, equal tokens of 30[, MB awake, asleep]) {said}; the same engine "
            f"without a swap {again}; {len(seen)} of 1500 tokens through a swap of {1e3 * report['pause_s']:.0f} ms: "
            f"{'ok' if fine else 'WRONG'}",
            flush=True,
        )


async def kill(box: Box) -> None:
    """Kill (-9) the core or the front end: the card's memory must be free when `wait_dead` returns."""
    a = box.version("llama-a", "llama", seed=1, **SHAPE)
    before = used()
    for which in ("core", "front end"):
        async with engine(box, spec_of(box, f"kill-{which[:4]}", a)) as (replica, sdk):
            pid = replica._child.pid
            victim = pid if which == "front end" else next(one for one in group_pids(pid) if one != pid)
            held = used() - before
            os.kill(victim, signal.SIGKILL)
            began_s = time.monotonic()
            told = await asyncio.wait_for(replica.wait_dead(), 30)
            left = used() - before
            print(
                f"kill of the {which}: held {held / 1e6:.0f} MB, {left / 1e6:.0f} MB left "
                f"{time.monotonic() - began_s:.2f} s "
                f"later ({told['exit'][:60]}): {'ok' if left < 50e6 else 'WRONG'}",
                flush=True,
            )


async def adapters(box: Box) -> None:
    """Check that three adapters in two slots answer like merged weights, before and after a sleep."""
    from tests.e2e.engine_support import save_model
    from tests.e2e.test_engine_adapters import save_adapter

    base = save_model(box.root / "versions" / "starter" / "v1", seed=1, **SHAPE)
    merged = [box.root / "versions" / f"merged{i}" for i in range(3)]
    names = [save_adapter(box.root / "adapters", base, f"ft:{i}", seed=10 + i, merged=merged[i]) for i in range(3)]
    roots = (str(box.root / "adapters"),)
    ask, wanted = [10, 20, 30, 40], []
    for number, path in enumerate(merged[:2]):
        async with engine(box, spec_of(box, f"merged{number}", path)) as (_, sdk):
            wanted.append(await greedy_ids(sdk, "starter", ask, 20))
    more = {"adapter_slots": 2, "adapter_max_rank": 16, "adapters_resident": 2, "adapter_roots": roots}
    async with engine(box, spec_of(box, "adapters", base, **more)) as (replica, sdk):
        said = []
        for _ in range(2):
            answers = await asyncio.gather(*(greedy_ids(sdk, name, ask, 20) for name in (*names, *names, "starter")))
            said.append([alike(answers[number], wanted[number]) for number in (0, 1)])
            await replica.sleep()
            await replica.wake("starter", base.name, str(base))
        fine = all(min(one) >= 8 for one in said)
        print(
            f"adapters: equal tokens of 20, before and after a sleep: {said}: "
            f"{'ok' if fine else 'not alike (bf16 may flip a few)'}"
        )


def used() -> int:
    if KIND != "cuda":
        return 0
    import pynvml

    pynvml.nvmlInit()
    found = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    pynvml.nvmlShutdown()
    return found


ONE = ("--disable-custom-all-reduce",)
ON_ONE = "benchmarks.gpu.one_card.entries:engine"
WHAT = {
    "swap": lambda box: turns(box, "swap", "llama"),
    "tied": lambda box: turns(box, "tied", "qwen2"),
    "experts": lambda box: turns(box, "experts", "mixtral"),
    "tensor2": lambda box: turns(box, "tensor2", "llama", ON_ONE, tensor_parallel=2, devices=(0, 1), more=ONE),
    "tensor2-experts": lambda box: turns(
        box,
        "tensor2e",
        "mixtral",
        ON_ONE,
        tensor_parallel=2,
        devices=(0, 1),
        more=ONE,
    ),
    **{form: functools.partial(quantised, form=form) for form in ("w8a8", "fp8")},
    **{f"{form}-128": functools.partial(quantised, form=form, size=formats.USUAL_GROUP) for form in FOUR_BITS},
    # On Hopper their kernels are compiled at the first start.
    **{f"{form}-32": functools.partial(quantised, form=form) for form in FOUR_BITS},
    # Layers with biases, which kernels pad or lay out differently. VLLM_DISABLED_KERNELS forces kernels for older GPUs.
    **{f"{form}-biases": functools.partial(quantised, form=form, family="qwen2") for form in ("fp8", *FOUR_BITS)},
    "kill": kill,
    "adapters": adapters,
}


async def main() -> None:
    box = Box()
    try:
        for name in sys.argv[2:] or WHAT:
            try:
                await asyncio.wait_for(WHAT[name](box), PART_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - the other parts still tell
                print(f"{name}: WRONG: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
    finally:
        box.close()


if __name__ == "__main__":
    asyncio.run(main())
