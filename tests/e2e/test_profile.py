"""A real world of ranks is profiled while it trains: it learns what it learns otherwise, to the bit."""

import gzip
import json
from pathlib import Path


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
    trace = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))
    assert any(
        "all_reduce" in str(row.get("name")) or "allreduce" in str(row.get("name")) for row in trace["traceEvents"]
    )
