from __future__ import annotations

import asyncio
import gc
import signal
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


def test_timeouts_use_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.sleep(7200)

    virtual_time.run(main())


def test_waiting_for_nothing_is_named() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        virtual_time.run(main())


def test_ctrl_c_during_any_task_ends_all_and_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    async def interrupted() -> None:
        await asyncio.sleep(1)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(3600)

    async def main() -> None:
        beside = asyncio.create_task(interrupted())
        await asyncio.sleep(7200)
        await beside

    with pytest.raises(KeyboardInterrupt):
        virtual_time.run(main())
    gc.collect()
    assert not caplog.records, "the simulator printed the traceback of whichever task Ctrl-C met"
