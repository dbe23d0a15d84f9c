"""A real trace, replayed open-loop to a real engine: asked directly, and through the gateway.

    python benchmarks/gateway_replay.py [--requests 150] [--seconds 25] [--rounds 2] [--traces FOLDER] [--json FILE]

Arrivals are those of Azure's conversation trace of 2023 (FOLDER/azure2023_conv.csv.gz, default
../shared/data/traces), its first so many requests squeezed into so many seconds, prompts and answers shortened in
proportion to what the engine's context holds. Each request is sent at its moment, whatever became of those before (open
loop), as a stream, by the OpenAI SDK. The CPU engine has one thread and a random Llama of 5 M parameters. Direct and
through the gateway take turns.

    dropped     requests that failed, or whose stream did not bring exactly the tokens asked for
    tokens/s    all tokens over the time from the first arrival to the last token
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_least, at_most, record  # noqa: E402 - the path comes first
from benchmarks._models import SIZES  # noqa: E402
from benchmarks.gateway_relay import KEY, free_port, push_table  # noqa: E402
from runtime.arithmetic import computes_bf16  # noqa: E402
from scheduler.sim_trace import read_requests  # noqa: E402
from serve.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, client, save_model  # noqa: E402

PROMPT_SHARE, ANSWER_SHARE = 1 / 8, 1 / 4
MOST_PROMPT, MOST_ANSWER = 256, 64


@dataclass(frozen=True)
class Asked:
    """at_s: seconds after the first; prompt and answer in tokens."""

    at_s: float
    prompt: int
    answer: int


def plan(path: Path, count: int, seconds: float) -> list[Asked]:
    """The first `count` requests of the trace, squeezed into `seconds`."""
    trace = read_requests(path)
    rows = list(zip(trace.arrival_s, trace.prompt, trace.output, strict=True))[:count]
    squeeze = seconds / max(rows[-1][0] - rows[0][0], 1e-9)
    return [
        Asked(
            (at_s - rows[0][0]) * squeeze,
            max(4, min(MOST_PROMPT, int(prompt * PROMPT_SHARE))),
            max(2, min(MOST_ANSWER, int(answer * ANSWER_SHARE))),
        )
        for at_s, prompt, answer in rows
    ]


async def replay(sdk: openai.AsyncOpenAI, model: str, asked: list[Asked], turn: int) -> dict[str, float]:
    began_s = time.perf_counter()
    firsts: list[float] = []
    dropped: list[str] = []

    async def send(number: int, row: Asked) -> int:
        await asyncio.sleep(max(0.0, began_s + row.at_s - time.perf_counter()))
        sent_s, tokens = time.perf_counter(), 0
        try:
            stream = await sdk.completions.create(
                model=model, prompt=[(turn * 7919 + number * 31 + n) % 300 + 10 for n in range(row.prompt)],
                max_tokens=row.answer, temperature=0, stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for event in stream:
                if event.choices and not tokens:
                    firsts.append(time.perf_counter() - sent_s)
                    tokens = 1
                if event.usage:
                    tokens = event.usage.completion_tokens
        except openai.OpenAIError as error:
            dropped.append(str(error))
            return 0
        if tokens != row.answer:
            dropped.append(f"{tokens} of {row.answer} tokens")
        return tokens

    tokens = sum(await asyncio.gather(*(send(number, row) for number, row in enumerate(asked))))
    took_s = time.perf_counter() - began_s
    for text in dropped[:3]:
        print(f"dropped: {text}", file=sys.stderr)
    return {
        "tokens_per_s": tokens / took_s, "dropped": len(dropped), "tokens": tokens,
        "first_p50_s": statistics.median(firsts), "first_p99_s": sorted(firsts)[int(len(firsts) * 0.99)],
    }  # fmt: skip


async def healthy(port: int) -> None:
    """Returns when the gateway has its table. Raises RuntimeError if it has none after a minute."""
    async with httpx.AsyncClient() as asking:
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if (await asking.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"the gateway on port {port} has no table after a minute")


async def measure(asked: list[Asked], rounds: int) -> dict:
    box, folder = Box(), Path(tempfile.mkdtemp(prefix="gwr-", dir="/tmp"))
    found: dict[str, list[dict[str, float]]] = {"direct": [], "gateway": []}
    with contextlib.ExitStack() as stack:
        stack.callback(box.close)
        base = save_model(box.root / "versions" / "v1", seed=1, **SIZES["5M"])
        dtype = "bfloat16" if computes_bf16("cpu") else "float32"
        spec = box.spec("r", base, model="m", dtype=dtype, max_num_seqs=32, kv_cache_bytes=256 * 2**20)
        replica = Replica(str(box.warm_socket), str(box.logs))
        await replica.start(spec)
        server = await push_table(str(folder / "bus.sock"), spec.socket_path)
        port = free_port()
        config = {"controller_socket": str(folder / "c.sock"), "bus_socket": str(folder / "bus.sock"), "port": port,
                  "log_path": str(folder / "access.log")}  # fmt: skip
        gateway = subprocess.Popen(
            [sys.executable, "-m", "appliance.gateway.main", "--config-json", json.dumps(config)],
            cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(gateway.wait)
        stack.callback(gateway.terminate)
        await healthy(port)
        peers = {
            "direct": client(spec),
            "gateway": openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=120
            ),
        }
        for sdk in peers.values():
            await replay(sdk, "m", asked[:10], 99)  # both warm
        for turn in range(rounds):
            # Whoever comes first in a round comes second in the next.
            for name in list(peers)[:: -1 if turn % 2 else 1]:
                found[name].append(await replay(peers[name], "m", asked, turn * 2 + (name == "gateway")))
                row = found[name][-1]
                print(
                    f"{name:8} {row['tokens_per_s']:7.1f} tokens/s, {row['dropped']:.0f} dropped of {len(asked)}, "
                    f"first token p50 {row['first_p50_s'] * 1e3:.0f} ms, p99 {row['first_p99_s'] * 1e3:.0f} ms",
                    flush=True,
                )  # fmt: skip
        await replica.stop()
        gateway.terminate()
        await asyncio.to_thread(gateway.wait)
        server.close()
        await asyncio.sleep(0.05)  # its end of the bus is still to be read
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=25.0, help="the arrivals are squeezed into so many")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--traces", type=Path, default=REPOSITORY.parent / "shared/data/traces", metavar="FOLDER")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args()
    path = options.traces / "azure2023_conv.csv.gz"
    if not path.is_file():
        print(f"no trace at {path}: left out")
        return
    asked = plan(path, options.requests, options.seconds)
    found = asyncio.run(measure(asked, options.rounds))
    rate = {name: statistics.median(row["tokens_per_s"] for row in rows) for name, rows in found.items()}
    dropped = sum(row["dropped"] for row in found["gateway"])
    print(f"gateway over direct: {rate['gateway'] / rate['direct']:.3f} of the tokens/s, {dropped:.0f} dropped")
    result = {"benchmark": "gateway_replay", "requests": len(asked), "rows": found, "rate": rate, "dropped": dropped}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    record(__file__, [
        at_least("replayed trace through the gateway against the engine directly", "Azure conversations",
                 rate["gateway"] / rate["direct"], "x", 0.97),
        at_most("requests of it dropped by the gateway", "Azure conversations", dropped, "", 0),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
