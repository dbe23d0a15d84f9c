"""Swap, wake and start of an engine against what they replace, all in one run on one machine.

    python benchmarks/engine_swap.py [--sizes 5M,50M,200M] [--rounds N] [--no-cold] [--json FILE]

Per model size (random Llama, bf16), on the CPU engine with one thread:

    memcpy          one warm copy of all weight bytes, one thread: the limit
    swap            staged, in-place and layerwise: `pause` as the engine reports it, and `gap` as a streaming client
                    sees it (longest time between two chunks around the swap, less the typical one)
    vLLM reload     vLLM's own `reload_weights` of the same directory on tmpfs, in its documented server
    fork start      a new engine forked from the warm parent, to its first token
    wake            a sleeping engine to its first token, from shared memory
    cold start      `python -m vllm.entrypoints.openai.api_server`, as documented, to its first token

The machine is shared and noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from serve.replica import Replica  # noqa: E402 - the repository has to be on the path first
from tests.e2e.engine_support import Box, client  # noqa: E402

SIZES = {
    "5M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096},
    "50M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16000},
    "200M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 16000},
}  # fmt: skip
WARM_ROUNDS = 1
PHASES = ("pause_s", "drain_step_s", "load_s", "canary_s", "stage_s")


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


async def gap_around(replica: Replica, sdk, model: str, version: Path, how: str) -> tuple[float, dict]:
    """Seconds the stream stood still for the swap beyond its usual pace, and the engine's report."""
    arrivals: list[float] = []

    async def read() -> None:
        stream = await sdk.completions.create(
            model=model, prompt="the quick", max_tokens=400, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            arrivals.append(time.perf_counter())

    reading = asyncio.create_task(read())
    while len(arrivals) < 30:
        await asyncio.sleep(0.001)
    report = await replica.swap(model, version.name, str(version), how=how)
    after = len(arrivals)
    while len(arrivals) < min(after + 15, 400) and not reading.done():
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    return max(gaps[20:]) - statistics.median(gaps), report


async def first_token(sdk, model: str) -> None:
    await sdk.completions.create(model=model, prompt="the", max_tokens=1)


async def own_engine(box: Box, size: str, versions: list[Path], rounds: int) -> dict:
    spec = box.spec(f"bench-{size}", versions[0], kv_cache_bytes=64 * 2**20)
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
        for how in ("staged", "in-place", "layerwise"):
            seen = []
            for turn in range(WARM_ROUNDS + rounds):
                gap_s, report = await gap_around(replica, sdk, spec.model, versions[(turn + 1) % 2], how)
                seen.append({"gap_s": gap_s, **{key: report[key] for key in PHASES}})
            seen = seen[WARM_ROUNDS:]
            found["swap"][how] = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
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


def documented_server(path: Path, rounds: int) -> dict:
    """Cold start of vLLM's own server to its first token, and its own reload of the weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(path.parent), "TMPDIR": str(path.parent),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--host", "127.0.0.1",
               "--port", str(port), "--dtype", "bfloat16", "--served-model-name", "starter"]  # fmt: skip
    log = open(path.parent / "cold.log", "wb")
    began_s = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd="/")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            while True:
                if server.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text()[-3000:])
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            body = {"model": "starter", "prompt": "the", "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()
            cold_s = time.perf_counter() - began_s
            reloads = []
            for _ in range(rounds + 1):
                reload_s = time.perf_counter()
                http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
                reloads.append(time.perf_counter() - reload_s)
        return {"cold_start_s": cold_s, "reload_s": statistics.median(reloads[1:])}
    finally:
        os.kill(server.pid, signal.SIGTERM)  # an orderly end removes its segments from /dev/shm
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            print("the documented server did not end by itself", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def table(results: dict) -> str:
    lines = []
    for size, row in results["sizes"].items():
        memcpy = row["memcpy_s"]
        lines.append(f"\n{size}: {row['bytes'] / 1e6:.0f} MB, memcpy {memcpy * 1e3:.1f} ms")
        cold = row.get("cold_start_s")
        for how, swap in row["swap"].items():
            text = (
                f"  swap {how:10} client gap {swap['gap_s'] * 1e3:7.1f} ms, pause {swap['pause_s'] * 1e3:7.1f} ms "
                f"= {swap['pause_s'] / memcpy:5.2f} x memcpy (step {swap['drain_step_s'] * 1e3:.1f}, "
                f"load {swap['load_s'] * 1e3:.1f}, canary {swap['canary_s'] * 1e3:.1f} ms)"
            )
            if cold:
                text += f"; reload/pause {row['reload_s'] / swap['pause_s']:.1f}"
                text += f", restart/gap {cold / swap['gap_s']:.0f}"
            lines.append(text)
        lines.append(f"  fork start to first token {row['fork_start_s']:.2f} s, wake {row['wake_s'] * 1e3:.0f} ms")
        asleep = row["asleep"]
        lines.append(
            f"  memory {asleep['rss_before_bytes'] / 1e6:.0f} -> {asleep['rss_after_bytes'] / 1e6:.0f} MB asleep, "
            f"in {asleep['seconds'] * 1e3:.0f} ms"
        )
        if cold:
            lines.append(
                f"  documented cold start {cold:.1f} s = {cold / row['fork_start_s']:.0f} x fork start "
                f"= {cold / row['wake_s']:.0f} x wake; vLLM reload {row['reload_s'] * 1e3:.0f} ms"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="5M,50M", help=f"comma list of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-cold", action="store_true", help="leave out vLLM's documented server (a minute each)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {
        "benchmark": "engine_swap",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: installed(name) for name in ("torch", "transformers", "openai")},
        "sizes": {},
    }
    box = Box()
    try:
        for size in options.sizes.split(","):
            shape = {**SIZES[size], "initializer_range": 0.05}
            versions = [box.version(f"{size}-{seed}", seed=seed, **shape) for seed in (1, 2)]
            row = {
                "bytes": (versions[0] / "model.safetensors").stat().st_size,
                "memcpy_s": memcpy_seconds(versions[0], options.rounds),
            }
            row |= asyncio.run(own_engine(box, size, versions, options.rounds))
            if not options.no_cold:
                row |= documented_server(versions[0], options.rounds)
            results["sizes"][size] = row
            for path in versions:
                shutil.rmtree(path)
    finally:
        box.close()
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
