"""Rollouts that go on by newer weights while an engine writes them: how long it writes nothing.

    python benchmarks/rollout_swap.py [--size 5M] [--rounds N] [--answers N] [--json FILE]

On the CPU engine with one thread, a random Llama, adapters of rank 16 as a model in training: `--answers` answers are
being written by one version, are interrupted (serve.core.sampling.INTERRUPT_URL), and go on by the next one. Of each
swap the times from its beginning

    returned     until all answers have come back with what they have
    standstill   until the first token of the next version is there, its adapter loaded and the beginnings read again,
                 less what one token takes of an adapter that is loaded

and of the adapter's load what the engine itself says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from appliance.controller.grading.spans import Line, written  # noqa: E402 - the path comes first
from benchmarks._claims import at_most, record, stated  # noqa: E402
from benchmarks._models import SIZES  # noqa: E402
from runtime.devices.kinds import HOST  # noqa: E402
from serve.core import sampling  # noqa: E402
from serve.engine.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, save_model  # noqa: E402
from tests.e2e.test_engine_adapters import save_adapter  # noqa: E402
from weights.format.names import policy_name  # noqa: E402

RANK, ROOM, BEGUN = 16, 256, 64
"""Of the adapters; tokens of an answer, and as many as one answer alone would have when they are interrupted: by a time
that was set, a fast machine had written all of them."""


class Rollouts:
    def __init__(self, http: httpx.AsyncClient):
        self._http, self._number = http, 0

    def ask(self, line: Line, model: str, room: int) -> tuple[str, asyncio.Task]:
        self._number += 1
        request_id, body = f"req_{self._number}", line.request(model, room, [])
        body["sampling_params"]["ignore_eos"] = True
        posted = self._http.post(sampling.URL, json=body, headers={"x-request-id": request_id})
        return request_id, asyncio.create_task(posted)

    async def interrupt(self, ids: list[str]) -> None:
        await self._http.post(sampling.INTERRUPT_URL, json=sampling.interrupt(ids))


async def tokens_s(rollouts: Rollouts, line: Line, model: str, tokens: int) -> float:
    """Seconds that so many more tokens of a line take, alone."""
    began_s = time.perf_counter()
    _, asking = rollouts.ask(line, model, len(line.ids) + tokens)
    (await asking).raise_for_status()
    return time.perf_counter() - began_s


async def swap(rollouts: Rollouts, old: str, new: str, answers: int, turn: int) -> tuple[float, float]:
    """Seconds (returned, standstill)."""
    lines = [Line(place, 1, turn * 1000 + place, [place // 8 + 10, 7, 8, 9]) for place in range(answers)]
    begun_s = await tokens_s(rollouts, Line(answers, 1, turn * 1000 + answers, [9, 7, 8]), old, BEGUN)
    asked = [rollouts.ask(line, old, ROOM) for line in lines]
    await asyncio.sleep(begun_s)
    began_s = time.perf_counter()
    await rollouts.interrupt([request_id for request_id, _ in asked])
    left: list[Line] = []
    for line, (_, asking) in zip(lines, asked, strict=True):
        left += written(line, old, sampling.read((await asking).json(), 1))[1]
    returned_s = time.perf_counter() - began_s
    assert len(left) == answers, "some had ended"
    first, *others = sorted(left, key=lambda line: -len(line.ids))
    assert first.ids, "none had begun"
    _, one_token = rollouts.ask(first, new, len(first.ids) + 1)
    going = [rollouts.ask(line, new, ROOM) for line in others]
    (await one_token).raise_for_status()
    standstill_s = time.perf_counter() - began_s
    await rollouts.interrupt([request_id for request_id, _ in going])
    await asyncio.gather(*(asking for _, asking in going))
    hot_s = await tokens_s(rollouts, first, new, 1)
    return returned_s, standstill_s - hot_s


async def measure(size: str, rounds: int, answers: int, dtype: str) -> dict:
    box = Box()
    try:
        base = save_model(box.root / "versions" / "starter" / "v1", seed=1, **SIZES[size])
        names = [
            save_adapter(box.root / "adapters", base, policy_name(f"ftjob-{number}"), seed=number, rank=RANK)
            for number in range(rounds + 2)
        ]
        engine = Replica(str(box.warm_socket), str(box.logs))
        spec = box.spec(
            "shared",
            base,
            dtype=dtype,
            adapter_slots=4,
            adapter_max_rank=RANK,
            adapters_resident=rounds + 2,
            adapter_roots=(str(box.root / "adapters"),),
        )
        await engine.start(spec)
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=spec.socket_path, limits=httpx.Limits(max_connections=None)),
            base_url="http://engine",
            timeout=120,
        ) as http:
            rollouts, found = Rollouts(http), []
            for turn, (old, new) in enumerate(zip(names, names[1:], strict=False)):
                found.append(await swap(rollouts, old, new, answers, turn))
        await engine.stop()
    finally:
        box.close()
    returned, standstill = zip(*found[1:], strict=True)  # the first warms up
    return {
        "returned_ms": [seconds * 1e3 for seconds in returned],
        "standstill_ms": [seconds * 1e3 for seconds in standstill],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="5M")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    dtype = "bfloat16" if HOST.computes_bf16() else "float32"
    found = asyncio.run(measure(asked.size, asked.rounds, asked.answers, dtype))
    size, rows = f"{asked.size}, {asked.answers} answers, {dtype}", []
    for name in ("returned_ms", "standstill_ms"):
        values = found[name]
        print(f"{name:14} median {statistics.median(values):.1f}, most {max(values):.1f}")
    rows.append(
        at_most("rollouts interrupted: standstill, median", size, statistics.median(found["standstill_ms"]), "ms", 30)
    )
    rows.append(stated("rollouts interrupted: returned, median", size, statistics.median(found["returned_ms"]), "ms"))
    record(__file__, rows)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
