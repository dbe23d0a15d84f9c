"""Sleeping engines give their memory back and wake exact, also with a version published meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from runtime.processes.kernel import group_pids
from serve.core.errors import VersionMismatch, WrongState
from tests.e2e.engine_support import client, greedy

MIB = 2**20
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.06,
}


async def test_sleep_frees_weights_and_kv_and_wakes_exact(engine_box, replicas):
    a = engine_box.version("large-a", seed=1, **LARGE)
    b = engine_box.version("large-b", seed=2, **LARGE)
    spec = engine_box.spec("sleeper", a, kv_cache_bytes=96 * MIB)
    replica = replicas()
    await replica.start(spec)
    sdk = client(spec)
    expected = await greedy(sdk, "starter")

    awake_bytes = (await replica.status())["rss_bytes"]
    await replica.sleep()
    weights, asleep = (a / "model.safetensors").stat().st_size, await replica.status()
    assert asleep["state"] == "asleep" and awake_bytes - asleep["rss_bytes"] > 0.9 * (weights + 96 * MIB)
    for call in (replica.sleep(), replica.swap("starter", "b", str(b))):
        with pytest.raises(WrongState, match="asleep"):
            await call

    held = asyncio.create_task(greedy(sdk, "starter"))
    while (status := await replica.status())["waiting"] == 0:
        assert not held.done() and status["state"] == "asleep"
    assert (status["state"], status["running"], status["waiting"]) == ("asleep", 0, 1)
    await replica.wake("starter", "a", str(a))
    assert await held == expected == await greedy(sdk, "starter")

    await replica.sleep()
    await replica.wake("tuned", "b", str(b))
    fresh = engine_box.spec("sleeper-fresh", b)
    await replicas().start(fresh)
    assert await greedy(sdk, "tuned") == await greedy(client(fresh), "starter")
    await replica.swap("starter", "a", str(a))
    assert await greedy(sdk, "starter") == expected


async def test_sleep_waits_for_nobody_to_be_served(engine_box, replicas):
    spec = engine_box.spec("busy", engine_box.version("long", seed=1, max_position_embeddings=4096))
    replica = replicas()
    pid = (await replica.start(spec))["pid"]
    core = next(each for each in group_pids(pid) if each != pid)
    sdk = client(spec)
    streams = [
        asyncio.create_task(
            sdk.completions.create(model="starter", prompt="x", max_tokens=1500, extra_body={"ignore_eos": True})
        )
        for _ in range(3)
    ]
    while (await replica.status())["running"] < len(streams):
        assert not any(stream.done() for stream in streams)
    # Their answers take longer than sleep's grace of two seconds, however quick the machine is.
    os.kill(core, signal.SIGSTOP)
    try:
        with pytest.raises(WrongState, match="drain it"):
            await replica.sleep()
    finally:
        os.kill(core, signal.SIGCONT)
    answers = await asyncio.gather(*streams)
    assert all(choice.finish_reason == "length" for answer in answers for choice in answer.choices)


async def test_a_refused_version_leaves_the_engine_asleep_and_wakeable(engine_box, replicas):
    a = engine_box.version("a", seed=1)
    other = engine_box.version("mistral-a", "mistral", seed=4)
    spec = engine_box.spec("refused-wake", a)
    replica = replicas()
    await replica.start(spec)
    expected = await greedy(client(spec), "starter")
    await replica.sleep()
    with pytest.raises(VersionMismatch):
        await replica.wake("starter", "other", str(other))
    await replica.wake("starter", "a", str(a))
    assert await greedy(client(spec), "starter") == expected


async def test_several_engines_sleep_side_by_side_and_each_wakes_with_its_own_version(engine_box, replicas):
    paths = [engine_box.version(name, seed=seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))]
    specs = [engine_box.spec(f"resident-{path.name}", path, kv_cache_bytes=64 * MIB) for path in paths]
    engines = [replicas() for _ in specs]
    expected = []
    for engine, spec in zip(engines, specs, strict=True):
        await engine.start(spec)
        expected.append(await greedy(client(spec), "starter"))
        awake_bytes = (await engine.status())["rss_bytes"]
        await engine.sleep()
        assert awake_bytes - (await engine.status())["rss_bytes"] > 0.9 * 64 * MIB
    assert [(await engine.status())["state"] for engine in engines] == ["asleep"] * 3
    for engine, spec, path, answer in zip(engines, specs, paths, expected, strict=True):
        await engine.wake("starter", path.name, str(path))
        assert await greedy(client(spec), "starter") == answer
