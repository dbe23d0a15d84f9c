"""Real ranks are profiled while they work: they compute what they compute otherwise, to the bit."""

import gzip
import json
from pathlib import Path


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
