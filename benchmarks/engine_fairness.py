"""What a neighbour on the same CPU engine sees while another owner sends eight long prompts at once.

    python benchmarks/engine_fairness.py [--size 50M] [--tokens 1700] [--json FILE]

A random Llama on the CPU engine with one thread. One owner's stream runs; another sends eight prompts; then the first
asks something short.

    gap         longest time between two chunks of the stream while the prompts are computed, and the usual one before
    first       the short request's time to its first token
    rate        prompt tokens a second of the eight, from the first one's start to the last one's end

With `--tree DIR` the engine is another checkout's, for a comparison: run both in turn on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PROMPTS = 8


async def measure(size: str, tokens: int) -> dict[str, float]:
    from benchmarks._models import SIZES
    from serve.engine.replica import Replica
    from tests.e2e.engine_support import Box, client

    box = Box()
    try:
        path = box.version("fair", seed=1, **SIZES[size] | {"max_position_embeddings": 4096})
        spec = box.spec("fair", path, kv_cache_bytes=1 << 30, max_num_seqs=16, max_model_len=4096)
        replica = Replica(str(box.warm_socket), str(box.logs))
        await replica.start(spec)
        try:
            return await _measured(client(spec), spec.model, tokens)
        finally:
            await replica.stop()
    finally:
        box.close()


async def _measured(sdk, model: str, tokens: int) -> dict[str, float]:
    seen: list[float] = []

    async def ask(owner: str, prompt: list[int], most: int, arrivals: list[float]) -> None:
        stream = await sdk.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=most,
            temperature=0,
            stream=True,
            timeout=600,
            extra_body={"ignore_eos": True},
            extra_headers={"x-appliance-owner": owner},
        )
        async for _ in stream:
            arrivals.append(time.perf_counter())

    await ask("neighbour", list(range(100, 400)), 4, [])  # warm
    reading = asyncio.create_task(ask("neighbour", [7, 8, 9], 3000, seen))
    while len(seen) < 40:
        await asyncio.sleep(0.005)
    usual_s = statistics.median(end - start for start, end in zip(seen[5:], seen[6:], strict=False))
    began_s = time.perf_counter()
    long = [
        asyncio.create_task(ask("many", [(turn * 31 + 11 * at) % 350 + 10 for at in range(tokens)], 2, []))
        for turn in range(PROMPTS)
    ]
    await asyncio.sleep(0.2)
    asked_s = time.perf_counter()
    first: list[float] = []
    asking = asyncio.create_task(ask("neighbour", [9, 8, 7], 2, first))
    await asyncio.gather(*long)
    took_s = time.perf_counter() - began_s
    await asking
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    during = [at for at in seen if at >= began_s - 1 and at <= began_s + took_s]
    return {
        "usual_s": usual_s,
        "gap_s": max(end - start for start, end in zip(during, during[1:], strict=False)),
        "first_s": first[0] - asked_s,
        "rate": PROMPTS * tokens / took_s,
        "chunks": len(during),
        "took_s": took_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50M")
    parser.add_argument("--tokens", type=int, default=1700)
    parser.add_argument("--tree", type=Path, default=REPOSITORY)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(args.tree))
    found = asyncio.run(measure(args.size, args.tokens))
    print(
        f"{args.size}, {PROMPTS} prompts of {args.tokens} tokens: longest gap {found['gap_s']:.2f} s "
        f"(usual {found['usual_s']:.3f}), short request's first token {found['first_s']:.2f} s, "
        f"{found['rate']:.0f} prompt tokens/s"
    )
    if args.json:
        args.json.write_text(json.dumps(found))
    elif args.tree == REPOSITORY:
        from benchmarks._claims import at_most, record, stated

        record(
            __file__,
            [
                at_most("gap of a neighbour's stream", args.size, found["gap_s"], "s", 1.0),
                stated("neighbour's first token", args.size, found["first_s"], "s"),
            ],
        )


if __name__ == "__main__":
    main()
