"""LoRA adapters on one engine: what they cost their base, and what a cold one costs, all in one run on one machine.

    python benchmarks/adapters.py [--size 5M] [--rounds N] [--json FILE]

On the CPU engine with one thread, a random Llama, adapters of rank 16 on every linear layer, 8 greedy requests at once:

    base, plain engine        tokens/s of the base on an engine without adapters
    base, adapter engine      the same on an engine that takes adapters, none in use
    one adapter, four, mixed  the same requests for one adapter, for four by turns, for base and four by turns; a merged
                              model has the plain engine's rate
    hot, cold                 one token of an adapter that is loaded, and of one that is not
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_least, record, stated  # noqa: E402 - the path comes first
from benchmarks._models import SIZES  # noqa: E402
from runtime.devices.kinds import HOST  # noqa: E402
from serve.engine.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, client, save_model  # noqa: E402
from tests.e2e.test_engine_adapters import save_adapter  # noqa: E402

ADAPTERS, SLOTS, RESIDENT, RANK = 12, 4, 4, 16
REQUESTS, TOKENS = 8, 64


async def rate(sdk, names: list[str], turn: int) -> float:
    """Tokens/s of REQUESTS greedy requests at once, for these models by turns; prompts new in every turn."""

    async def ask(number: int) -> None:
        await sdk.completions.create(
            model=names[number % len(names)],
            prompt=[turn % 300 + 10, number + 10, 7, 8, 9],
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    began_s = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    return REQUESTS * TOKENS / (time.perf_counter() - began_s)


async def one_token_s(sdk, name: str) -> float:
    began_s = time.perf_counter()
    await sdk.completions.create(model=name, prompt=[9, 8, 7], max_tokens=1, temperature=0)
    return time.perf_counter() - began_s


async def measure(size: str, rounds: int, dtype: str) -> dict:
    box = Box()
    try:
        base = save_model(box.root / "versions" / "starter" / "v1", seed=1, **SIZES[size])
        names = [save_adapter(box.root / "adapters", base, f"a{i}", seed=i, rank=RANK) for i in range(ADAPTERS)]
        base_bytes = (base / "model.safetensors").stat().st_size
        adapter_bytes = sum(file.stat().st_size for file in (box.root / "adapters" / "a0" / "v1").iterdir())
        plain, shared = (Replica(str(box.warm_socket), str(box.logs)) for _ in range(2))
        own = box.spec("plain", base, dtype=dtype)
        many = box.spec(
            "shared",
            base,
            dtype=dtype,
            adapter_slots=SLOTS,
            adapter_max_rank=RANK,
            adapters_resident=RESIDENT,
            adapter_roots=(str(box.root / "adapters"),),
        )
        await plain.start(own)
        await shared.start(many)
        cases = {
            "base, plain engine": (client(own), ["starter"]),
            "base, adapter engine": (client(many), ["starter"]),
            "one adapter": (client(many), names[:1]),
            "four adapters": (client(many), names[:4]),
            "base and four adapters": (client(many), ["starter", *names[:3], "starter", *names[3:4]]),
        }
        rates: dict[str, list[float]] = {case: [] for case in cases}
        for turn in range(rounds + 1):  # alternating, so that a noisy neighbour hits all alike; the first warms up
            for case, (sdk, asked) in cases.items():
                found = await rate(sdk, asked, turn)
                if turn:
                    rates[case].append(found)
        sdk = client(many)
        cold = [await one_token_s(sdk, name) for name in names]  # more than fit: each pushes another one out
        hot = [await one_token_s(sdk, names[-1]) for _ in range(ADAPTERS)]
        await plain.stop()
        await shared.stop()
    finally:
        box.close()
    return {
        "size": size,
        "base_bytes": base_bytes,
        "adapter_bytes": adapter_bytes,
        "tokens_per_s": {case: statistics.median(found) for case, found in rates.items()},
        "hot_ms": statistics.median(hot) * 1e3,
        "cold_ms": statistics.median(cold) * 1e3,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="5M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    dtype = "bfloat16" if HOST.computes_bf16() else "float32"
    found = asyncio.run(measure(options.size, options.rounds, dtype))
    plain = found["tokens_per_s"]["base, plain engine"]
    print(f"{options.size}, {REQUESTS} requests of {TOKENS} tokens at once, {dtype}, median of {options.rounds}")
    for case, tokens_per_s in found["tokens_per_s"].items():
        print(f"  {case:24} {tokens_per_s:8.0f} tokens/s  {tokens_per_s / plain:5.2f} of the plain engine's")
    print(
        f"  one token: hot {found['hot_ms']:.1f} ms, cold {found['cold_ms']:.1f} ms for {found['adapter_bytes']} bytes"
    )
    rates, size = found["tokens_per_s"], options.size
    record(
        __file__,
        [
            at_least(
                "base on an engine that takes adapters, over a plain one",
                size,
                rates["base, adapter engine"] / plain,
                "x",
                0.97,
            ),
            stated(
                "four adapters in one batch, over the base on a plain engine", size, rates["four adapters"] / plain, "x"
            ),
            stated(
                "bytes of an adapter of rank 16, over the base's",
                size,
                found["adapter_bytes"] / found["base_bytes"],
                "x",
            ),
        ],
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
