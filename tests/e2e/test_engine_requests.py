"""What an engine makes of requests that no client would send."""

from __future__ import annotations

import pytest

from runtime.processes.child import Child
from tests.e2e.engine_support import Box


async def found(box: Box, seed: int, share: float, pairs: int) -> list[str]:
    args = {"root": str(box.root / "fuzz"), "seed": seed, "share": share, "pairs": pairs}
    child = await Child.spawn(
        box.warm_socket, "tests.e2e.request_fuzz:main", args, log_path=box.logs / f"fuzz-{seed}.log", name="fuzz"
    )
    event = await child.next_event()
    await child.closed()
    assert event["event"] == "fuzz", event
    return event["faults"]


async def test_no_request_is_answered_with_a_500_or_in_words_of_the_engines_code(engine_box: Box):
    assert await found(engine_box, seed=1, share=0.04, pairs=2) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
async def test_no_request_out_of_some_hundred_thousand_is(engine_box: Box, seed: int):
    assert await found(engine_box, seed=seed, share=1, pairs=1000) == []
