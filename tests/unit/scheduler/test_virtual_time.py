from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.simulator import virtual_time


@pytest.mark.parametrize("start_s", [0.0, 1_772_485_200.0, 1_772_485_200.123456])
def test_hours_pass_at_once_in_the_order_of_the_timers(start_s: float) -> None:
    seen: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        for _ in range(50):
            await asyncio.sleep(seconds)
        seen.append(name)

    async def main() -> float:
        await asyncio.gather(sleeper("slow", 71.3), sleeper("quick", 0.0301), sleeper("middle", 7.77))
        return virtual_time.VirtualClock().now_s() - start_s

    began_s = time.monotonic()
    assert virtual_time.run(main(), start_s) == pytest.approx(50 * 71.3, abs=1e-3)
    assert seen == ["quick", "middle", "slow"] and time.monotonic() - began_s < 60


def test_waiting_for_nothing_is_named() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        virtual_time.run(main())
