"""What is cheap to ask for and costs everybody: of the time it takes, one owner has a fifth."""

from __future__ import annotations

import asyncio

from appliance.controller.context.paced import Paced


async def test_an_owner_waits_four_times_as_long_as_his_last_one_took_and_no_other_does():
    """A sharing is a new table for every gateway: with 10,000 names one that reads it has its streams wait for 0.2 s,
    and one owner could ask for twenty a second."""
    now_s, done = 100.0, list[tuple[str, float]]()

    async def sleep(for_s: float) -> None:
        nonlocal now_s
        now_s += for_s
        await asyncio.sleep(0)

    paced = Paced(clock=lambda: now_s, sleep=sleep)

    async def change(owner: str, took_s: float) -> None:
        nonlocal now_s
        async with paced.turn(owner):
            done.append((owner, now_s))
            now_s += took_s

    await change("ann", 0.5)
    await change("ben", 0.25)
    await change("ann", 0.5)
    await change("ben", 0.25)
    assert done == [("ann", 100.0), ("ben", 100.5), ("ann", 102.5), ("ben", 103.0)]
    now_s += 60
    await change("cem", 0.0)
    assert list(paced._free_s) == ["cem"], "nothing is kept of those whose time has come"


async def test_those_of_one_owner_come_one_after_the_other_and_a_failure_is_one_too():
    paced, inside, most = Paced(clock=lambda: 0.0), 0, 0

    async def change(owner: str) -> None:
        nonlocal inside, most
        async with paced.turn(owner):
            inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0)
            inside -= 1
            raise ValueError

    found = await asyncio.gather(*(change("ann") for _ in range(3)), return_exceptions=True)
    assert most == 1 and [type(one) for one in found] == [ValueError] * 3
