"""A real trace, replayed open-loop to a real engine: asked directly, and through the gateway.

    python benchmarks/gateway_replay.py [--requests 150] [--seconds 25] [--rounds 2] [--nginx] [--traces FOLDER]
    python benchmarks/gateway_replay.py --requests 100 --seconds 2 --rounds 12     # more than the engine can do

Arrivals are those of Azure's conversation trace of 2023 (FOLDER/azure2023_conv.csv.gz, default
../shared/data/traces), its first so many requests squeezed into so many seconds, prompts and answers shortened in
proportion to what the engine's context holds. Each request is sent at its moment, whatever became of those before (open
loop), as a stream, by the OpenAI SDK. The CPU engine has one thread and a random Llama of 5 M parameters. Direct and
through the gateway take turns; with --nginx, nginx as a reverse proxy too.

    dropped     requests that failed, or whose stream did not bring exactly the tokens asked for
    tokens/s    all tokens over the time from the first arrival to the last token
    ratio       of each round: tokens/s over those of its neighbour that asked directly. The machine is quicker and
                slower from one minute to the next by more than the gateway costs, neighbours see the same machine;
                given are the median of the rounds and the middle half of them
    CPU         of client, proxy and engine, µs for each token. Where they share all cores and these are busy, no proxy
                can do better than the ceiling: what the others used when asked directly over that and its own
    batch       tokens of one engine step: smaller if a proxy held requests back
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
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
from benchmarks.gateway_relay import KEY, NGINX_CONFIG, cpu_s, free_port, push_table, tree  # noqa: E402
from benchmarks.simulator.trace import read_requests  # noqa: E402
from runtime.devices.kinds import HOST  # noqa: E402
from serve.core.spec import ReplicaSpec  # noqa: E402
from serve.engine.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, client, save_model  # noqa: E402

PATIENCE_S = 120.0
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
                model=model,
                prompt=[(turn * 7919 + number * 31 + n) % 300 + 10 for n in range(row.prompt)],
                max_tokens=row.answer,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
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
        "tokens_per_s": tokens / took_s,
        "dropped": len(dropped),
        "tokens": tokens,
        "first_p50_s": statistics.median(firsts),
        "first_p99_s": sorted(firsts)[int(len(firsts) * 0.99)],
    }


async def healthy(port: int) -> None:
    """Returns when the gateway has its table. Raises RuntimeError if it has none after a minute."""
    async with httpx.AsyncClient() as asking:
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if (await asking.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"the gateway on port {port} has no table after a minute")


async def engine_steps(spec: ReplicaSpec) -> float:
    """How often the engine has computed so far."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=spec.socket_path)) as asking:
        text = (await asking.get("http://engine/metrics")).text
    name = "vllm:iteration_tokens_total_count"
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def measure(asked: list[Asked], rounds: int, with_nginx: bool) -> dict[str, list[dict[str, float]]]:
    """By peer one row for each round."""
    box, folder = Box(), Path(tempfile.mkdtemp(prefix="gwr-", dir="/tmp"))
    found: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(box.close)
        base = save_model(box.root / "versions" / "v1", seed=1, **SIZES["5M"])
        dtype = "bfloat16" if HOST.computes_bf16() else "float32"
        spec = box.spec("r", base, model="m", dtype=dtype, max_num_seqs=32, kv_cache_bytes=256 * 2**20)
        replica = Replica(str(box.warm_socket), str(box.logs))
        await replica.start(spec)
        server = await push_table(str(folder / "bus.sock"), spec.socket_path)
        ports = {"gateway": free_port(), "nginx": free_port()}
        config = {
            "controller_socket": str(folder / "c.sock"),
            "bus_socket": str(folder / "bus.sock"),
            "port": ports["gateway"],
            "log_path": str(folder / "access.log"),
        }
        config_file = folder / "gateway.json"
        config_file.write_text(json.dumps(config))
        commands = {"gateway": [sys.executable, "-m", "appliance.gateway.main", "--config", str(config_file)]}
        if with_nginx:
            (folder / "nginx.conf").write_text(
                NGINX_CONFIG.format(
                    user="user root;" if os.geteuid() == 0 else "",
                    folder=folder,
                    socket=spec.socket_path,
                    port=ports["nginx"],
                )
            )
            program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "nginx"
            commands["nginx"] = [program, "-c", str(folder / "nginx.conf")]
        proxies: dict[str, subprocess.Popen[bytes]] = {}
        for name, command in commands.items():
            proxies[name] = process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        await healthy(ports["gateway"])
        peers = {"direct": client(spec)}
        for name in proxies:
            url = f"http://127.0.0.1:{ports[name]}/v1"
            peers[name] = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
        for sdk in peers.values():
            await replay(sdk, "m", asked[:40], 99)  # all warm
        for turn in range(rounds):
            # Whoever comes first in a round comes last in the next, so that neighbours are as near as they can be.
            for name in list(peers)[:: -1 if turn % 2 else 1]:
                sharing = {"client": [os.getpid()], "engine": tree(box.parent_pid)}
                if name in proxies:
                    sharing["proxy"] = tree(proxies[name].pid)
                steps, before = await engine_steps(spec), {who: cpu_s(pids) for who, pids in sharing.items()}
                row = await replay(peers[name], "m", asked, turn * 4 + list(peers).index(name))
                used = {who: cpu_s(pids) - before[who] for who, pids in sharing.items()}
                row |= {f"{who}_us": seconds / row["tokens"] * 1e6 for who, seconds in used.items()}
                row["batch"] = row["tokens"] / (await engine_steps(spec) - steps)
                found.setdefault(name, []).append(row)
                print(
                    f"{name:8} {row['tokens_per_s']:7.1f} tokens/s, {row['dropped']:.0f} dropped of {len(asked)}, "
                    f"first token p50 {row['first_p50_s'] * 1e3:.0f} ms, p99 {row['first_p99_s'] * 1e3:.0f} ms, "
                    f"batch {row['batch']:.1f}, CPU of a token: "
                    + ", ".join(f"{who} {row[f'{who}_us']:.0f} µs" for who in used),
                    flush=True,
                )
        await replica.stop()
        proxies["gateway"].terminate()
        await asyncio.to_thread(proxies["gateway"].wait)
        server.close()
        await asyncio.sleep(0.05)  # its end of the bus is still to be read
    return found


def compare(rows: list[dict[str, float]], direct: list[dict[str, float]]) -> dict[str, float]:
    """A proxy beside its neighbours: ratio (median, first and third quartile over the rounds), CPU, ceiling."""
    ratios = [row["tokens_per_s"] / beside["tokens_per_s"] for row, beside in zip(rows, direct, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    others_us = statistics.median(row["client_us"] + row["engine_us"] for row in direct)
    own_us = statistics.median(row["proxy_us"] for row in rows)
    return {
        "ratio": ratio,
        "ratio_q1": low,
        "ratio_q3": high,
        "own_us": own_us,
        "others_us": others_us,
        "others_beside_it_us": statistics.median(row["client_us"] + row["engine_us"] for row in rows),
        "ceiling": others_us / (others_us + own_us),
        "batch": statistics.median(row["batch"] for row in rows),
        "batch_direct": statistics.median(row["batch"] for row in direct),
        "dropped": sum(row["dropped"] for row in rows),
    }


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=25.0, help="the arrivals are squeezed into so many")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nginx", action="store_true", help="nginx takes part (apt-get install nginx-light)")
    parser.add_argument("--traces", type=Path, default=REPOSITORY.parent / "shared/data/traces", metavar="FOLDER")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args()
    path = options.traces / "azure2023_conv.csv.gz"
    if not path.is_file():
        print(f"no trace at {path}: left out")
        return
    asked = plan(path, options.requests, options.seconds)
    found = asyncio.run(measure(asked, options.rounds, options.nginx))
    compared = {name: compare(rows, found["direct"]) for name, rows in found.items() if name != "direct"}
    for name, row in compared.items():
        print(
            f"{name} over direct: {row['ratio']:.3f} of the tokens/s (median of {options.rounds} rounds, middle half "
            f"{row['ratio_q1']:.3f} to {row['ratio_q3']:.3f}), {row['dropped']:.0f} dropped; batch {row['batch']:.1f}, "
            f"directly {row['batch_direct']:.1f}; CPU of a token {row['own_us']:.0f} µs, of client and engine "
            f"{row['others_beside_it_us']:.0f} µs, directly {row['others_us']:.0f}: ceiling {row['ceiling']:.3f}"
        )
    gateway = compared["gateway"]
    result = {"benchmark": "gateway_replay", "requests": len(asked), "rows": found, "compared": compared}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    size = f"Azure conversations, {options.requests} in {options.seconds:g} s"
    record(
        __file__,
        [
            at_least(
                "replayed trace through the gateway against the engine directly", size, gateway["ratio"], "x", 0.97
            ),
            at_most("requests of it dropped by the gateway", size, gateway["dropped"], "", 0),
        ],
    )


if __name__ == "__main__":
    main()
