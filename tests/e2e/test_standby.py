"""Standby learned from real traffic: streams in bursts with gaps, a job on the other devices, mode `auto`."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import httpx
import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import WholeBox, wait_for
from tests.train_support.tiny import make_model_dir, write_chat_file

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

TARGET_S = 2.0
LENGTHS = (200, 1500)  # characters of a prompt, each a token of the tiny tokenizer
BURSTS, GAP_S, MOST = 6, 10.0, 4
REST_S = 15.0
SETTINGS = f"""
[scheduler]
give_back_after_s = 4
give_back_at_latest_s = {REST_S}
job_dwell_s = 5
"""


@pytest.fixture
def box(tmp_path_factory):
    one = WholeBox(tmp_path_factory.mktemp("box"))
    (one.data_dir / "appliance.toml").write_text(SETTINGS)
    try:
        one.up()
        yield one
        one.run("down")
        assert one.left() == []
    finally:
        one.destroy()


def test_standby_is_learned_and_kept_while_a_job_has_the_rest(box, tmp_path):
    tiny = make_model_dir(tmp_path / "tiny", hidden_size=128, intermediate_size=256, max_position_embeddings=4096)
    box.run("model", "import", str(tiny), "--name", "tiny")
    box.run(
        "model", "deploy", "tiny", "--min-replicas", "1", "--max-replicas", str(MOST), "--ttft-p95-s", str(TARGET_S)
    )
    box.run("mode", "set", "auto", "--wait")
    data = box.upload(write_chat_file(tmp_path / "train.jsonl", 4000).read_bytes())
    job = box.submit("tiny", data, "--epochs 50 --batch-size 30 --max-length 64 --lora-rank 4 --max-devices 6")
    # 30 examples go over 1, 2, 3, 5 or 6 ranks: six with one or two engines, five with three, three with four.
    wait_for(lambda: len(held(box, job)) == 6 and box.losses(job), "a step of the job beside one engine", 150)

    # One after the other, so that each has its engine to itself: what a replica computes is learned.
    lone = asyncio.run(one_by_one(box, 30))
    print(f"alone: ttft of short ones {spread(lone[::2])}, of long ones {spread(lone[1::2])}")
    learned = wait_for(lambda: standby(box), "a standby", 10)
    direct = asyncio.run(directly(box, 16))
    print(f"{learned} Asked of the engine itself: {direct:.0f} estimated tokens/s.")
    rate = rate_of(learned)
    assert 0.4 < rate / direct < 2.5

    # Bursts that one replica cannot begin in time, with gaps that a hand-over there and back does not fit into.
    per_burst = max(int(2.2 * TARGET_S * rate / (LENGTHS[1] / 4)), 4)
    steps, open_before = max(box.losses(job)), []
    for number in range(BURSTS):
        open_before.append(open_replicas(box))
        began_s = time.monotonic()
        ttft = asyncio.run(burst(box, per_burst, seed=100 + number))
        print(
            f"burst {number}: {per_burst} streams, {open_before[-1]} replicas before and {open_replicas(box)} after "
            f"it, ttft {spread(ttft)}, job on {len(held(box, job))}; {standby(box)}",
            flush=True,
        )
        time.sleep(max(GAP_S - (time.monotonic() - began_s), 3.0))
    wanted = standby(box)
    kept = open_replicas(box)
    print(f"at rest: {wanted}; {kept} open, the job on {len(held(box, job))}")
    assert count_of(wanted) > 1 and kept >= count_of(wanted)
    assert max(box.losses(job)) > steps, "the job went on with what was left"

    wait_for(lambda: len(held(box, job)) == 6, "the devices to come back to the job", 120)
    rows = [row for row in box.steps(job) if row["loss"]]
    print(
        f"the job took {len(rows)} steps on {sorted({row['devices'] for row in rows})} devices; "
        f"{len(box.ask('mode', 'history', '--limit', '200')['data'])} hand-overs"
    )
    box.run("job", "cancel", job)


# --- traffic


def prompt(length: int, draw: random.Random) -> str:
    return "".join(draw.choice("abcdefghij ") for _ in range(length))


def body(length: int, draw: random.Random) -> dict:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt(length, draw)}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }


async def streamed(client: httpx.AsyncClient, url: str, asked: dict) -> float:
    """Seconds to the first token; the answer must come to its end."""
    began_s, first_s, last = time.monotonic(), None, ""
    async with client.stream("POST", url, json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                last = line
                if first_s is None:
                    first_s = time.monotonic() - began_s
    assert last == "data: [DONE]" and first_s is not None, last
    return first_s


def client_of(box) -> httpx.AsyncClient:
    return httpx.AsyncClient(headers={"Authorization": f"Bearer {box.key}"}, timeout=120)


async def one_by_one(box, count: int) -> list[float]:
    draw = random.Random(1)
    async with client_of(box) as client:
        return [await streamed(client, f"{box.url}/chat/completions", body(LENGTHS[n % 2], draw)) for n in range(count)]


async def burst(box, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    async with client_of(box) as client:
        asked = [streamed(client, f"{box.url}/chat/completions", body(LENGTHS[1], draw)) for _ in range(count)]
        return await asyncio.gather(*asked)


async def directly(box, count: int) -> float:
    """Prompt tokens, as routing estimates them (a quarter of the body's bytes), per second of the engine alone."""
    draw, seconds = random.Random(2), {length: [] for length in LENGTHS}
    replica, *_ = [r["id"] for r in box.admin("status")["replicas"] if r["state"] == "open"]
    transport = httpx.AsyncHTTPTransport(uds=str(BoxPaths.of(box.data_dir).replica_sockets / f"{replica}.sock"))
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        for number in range(count):
            length = LENGTHS[number % 2]
            asked = body(length, draw)
            seconds[length].append(await streamed(client, "http://engine/v1/chat/completions", asked))
    short, long = (statistics.median(seconds[length]) for length in LENGTHS)
    return (LENGTHS[1] - LENGTHS[0]) / 4 / (long - short)


# --- what the box says


def standby(box) -> str:
    return box.ask("mode", "plan")["standby"].get("tiny", "")


def count_of(text: str) -> int:
    return int(text.partition(" replica")[0].split()[-1])


def rate_of(text: str) -> float:
    return float(text.partition(" prompt tokens")[0].split()[-1].replace(",", ""))


def open_replicas(box) -> int:
    return sum(r["state"] == "open" for r in box.admin("status")["replicas"])


def held(box, holder: str) -> list[str]:
    return [d["id"] for d in box.admin("status")["devices"] if d["holder"] and d["holder"]["id"] == holder]


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = [ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0, 0.5, 0.95)]
    return f"{at[0]:.2f}/{at[1]:.2f}/{at[2]:.2f} s (least/p50/p95)"
