"""Real ranks and a real engine are profiled while they work: they compute what they compute otherwise, to the bit."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from serve.core.errors import WrongState
from tests.e2e.engine_support import client, greedy


def names(trace: str | None) -> set[str]:
    assert trace is not None
    return {str(row.get("name")) for row in json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]}


async def test_a_job_is_profiled_in_its_midst(shop):
    plain = await shop.run(shop.spec("plain"), 2)
    world = await shop.launch(shop.spec("looked-at"), 2).start()
    await world.group.profile(2)
    outcome = await world.group.wait()
    assert outcome.outcome == "succeeded", world.logs()
    (found,) = world.of("profiled")
    assert found["steps"] == 2 and world.losses() == plain.losses()
    share = found["share"]
    print({name: f"{took / found['seconds']:.0%}" for name, took in share.items()}, found["operators"][:3])
    assert share["compute"] > 0 and share["communication"] > 0 and share["input"] > 0
    assert any("all_reduce" in name or "allreduce" in name for name in names(found["trace"]))


async def test_an_engine_is_profiled_while_it_answers(engine_box, replicas):
    spec = engine_box.spec("profiled", engine_box.version("profiled-a", seed=1))
    replica = replicas()
    await replica.start(spec)
    sdk = client(spec)
    expected = await greedy(sdk, "starter", tokens=64)
    for _ in range(2):  # the second time in the same process
        profile = asyncio.create_task(replica.profile(3, 60.0))
        while not profile.done():
            assert await greedy(sdk, "starter", tokens=64) == expected
        found = await profile
        assert found["steps"] >= 3 and (found["model"], found["version"]) == ("starter", "profiled-a")
        assert found["share"]["compute"] > 0 and found["bytes"] > 0
    print({name: f"{took / found['seconds']:.0%}" for name, took in found["share"].items()}, found["operators"][:3])
    assert any(name.startswith("aten::") for name in names(found["trace"]))
    assert len(list(Path(found["trace"]).parent.glob("*.trace.json.gz"))) == 1

    idle = await replica.profile(5, 0.3)
    assert idle["steps"] == 0 and idle["share"]["compute"] < idle["seconds"]
    first = asyncio.create_task(replica.profile(5, 1.0))
    await asyncio.sleep(0)
    with pytest.raises(WrongState, match="already"):
        await asyncio.gather(replica.profile(5, 1.0), first)
    await asyncio.gather(first, return_exceptions=True)
    await replica.sleep()
    with pytest.raises(WrongState, match="asleep"):
        await replica.profile(1, 1.0)
    await replica.wake("starter", "profiled-a", str(engine_box.version("profiled-a", seed=1)))
    assert await greedy(sdk, "starter", tokens=64) == expected
