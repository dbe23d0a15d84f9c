"""Cost for the gateway of a thousand clients that disconnect and two thousand that wait, in printed counts, with the
real gateway process and a canned engine. Run with `make soak`, or
`pytest -m soak -s tests/e2e/test_gateway_soak.py`.
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.front.box import Front, running_front
from tests.front.clients import Neighbours, allow_descriptors, connect, stream_request

MIB = 1 << 20
HELD = 2000
# One owner has all streams here; the default limit is 1536 requests per worker.
LIMITS = {"keepalive_s": 5.0, "owner_requests": 2 * HELD}
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    allow_descriptors(3 * HELD)
    with running_front(limits=LIMITS, sweep_s=0.1, holds={"sse_grace_s": 1.0, "sse_interval_s": 1.0}) as running:
        with Neighbours(running) as warming:
            running.wait(lambda: warming.asked > 100)
        yield running


class Before:
    """Resources of the idle gateway, for a later comparison."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.descriptors, self.rss_bytes = front.descriptors(), front.rss_bytes()

    async def settles(self, what: str, *, growth_bytes: int) -> None:
        """Check that connections, descriptors and counters return to their initial values, and memory nearly."""
        front, seen = self.front, {}

        def idle() -> bool:
            seen.update(front.series("connections", "inflight", "held", "buffered_body_bytes"))
            seen.update(more_descriptors=front.descriptors() - self.descriptors, streaming=front.counts.streaming)
            # The request for these figures is one connection.
            return (
                seen["connections"] <= 4
                and seen["more_descriptors"] <= 4
                and not any(seen[name] for name in ("inflight", "held", "buffered_body_bytes", "streaming"))
            )

        try:
            await until(idle, 20)
        except TimeoutError:
            pytest.fail(f"{what}; but it does not settle: {seen}")
        grown = front.rss_bytes() - self.rss_bytes
        print(f"\n{what}; afterwards {front.descriptors() - self.descriptors:+d} descriptors, {grown / MIB:+.1f} MiB")
        assert grown < growth_bytes


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    await asyncio.to_thread(Front.wait, condition, seconds)


async def test_two_thousand_streams_survive_mode_switch(front: Front) -> None:
    """200 streams run when the engine drains; 2000 more arrive before it is back. The second round reuses the heap."""
    await drained_and_held(front, growth_bytes=96 * MIB)
    await drained_and_held(front, growth_bytes=32 * MIB)


async def drained_and_held(front: Front, *, growth_bytes: int) -> None:
    before = Before(front)
    running = [await connect(front, stream_request(front.key, 60, 0.05)) for _ in range(200)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(client.first for client in running))
    await asyncio.to_thread(front.serve, "draining")
    with_running = front.rss_bytes()
    held = [await connect(front, stream_request(front.key, 8, 0.01)) for _ in range(HELD)]
    await until(lambda: front.held() == HELD)
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.over for client in running))
    await until(lambda: not front.inflight())
    await asyncio.to_thread(front.serve, replicas=0)  # asleep
    await until(lambda: all(b": held\n\n" in client.received for client in held))
    each = (front.rss_bytes() - with_running) / HELD
    await asyncio.to_thread(front.serve, "open")
    async with asyncio.timeout(120):
        await asyncio.gather(*(client.over for client in held))
    for clients, events in ((running, 60), (held, 8)):
        assert all(client.whole and client.events == events for client in clients)
    for client in running + held:
        assert client.transport is not None
        client.transport.abort()
    await before.settles(
        f"200 streams drained and {HELD} held over a mode switch: {200 + HELD} whole, 0 cut short; "
        f"{each / 1024:.1f} KiB per held stream",
        growth_bytes=growth_bytes,
    )


async def test_thousand_disconnects_free_all_resources(front: Front) -> None:
    before, aborted = Before(front), front.counts.aborted
    request = stream_request(front.key, 100_000, 0.01)
    with Neighbours(front) as neighbours:
        for _ in range(20):
            clients = await asyncio.gather(*(connect(front, request) for _ in range(50)))
            async with asyncio.timeout(30):
                await asyncio.gather(*(client.first for client in clients))
            for client in clients:
                assert client.events and client.transport is not None
                client.transport.abort()
        await until(lambda: front.counts.aborted - aborted == 1000)
    assert not neighbours.failed
    await before.settles(
        f"1000 disconnects in mid-stream: 1000 aborted at the engine; neighbours: {neighbours.asked} requests, "
        f"0 failed",
        growth_bytes=24 * MIB,
    )
