"""What is gone is told of on the loop, wherever it goes."""

from __future__ import annotations

import asyncio
import gc
import threading

from runtime.when_gone import when_gone


class Thing:
    """One that only a collection of cycles finds."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_a_collection_on_a_thread_finds_is_told_of_on_the_loop():
    """Followers of responses and of pages were counted down on whatever thread Python collected on."""
    told_on, told = list[int](), asyncio.Event()

    def tell() -> None:
        told_on.append(threading.get_ident())
        told.set()

    gc.disable()
    try:
        when_gone(Thing(), tell)
        await asyncio.to_thread(gc.collect)
        await asyncio.wait_for(told.wait(), 60)
    finally:
        gc.enable()
    assert told_on == [threading.get_ident()]


async def test_where_it_goes_it_is_not_told_of_at_once():
    """The loop may be in the midst of the change that this would make."""
    told = list[str]()
    thing: Thing | None = Thing()
    when_gone(thing, lambda: told.append("gone"))
    thing = None
    gc.collect()
    assert not told
    await asyncio.sleep(0)
    assert told == ["gone"]


def test_nobody_hears_of_it_once_the_loop_is_closed():
    told = list[str]()

    async def begun() -> Thing:
        thing = Thing()
        when_gone(thing, lambda: told.append("gone"))
        return thing

    thing: Thing | None = asyncio.run(begun())
    assert thing is not None
    thing = None
    gc.collect()
    assert not told
