"""The doctor beside a running box: one process for all who ask, its failures in words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from appliance.controller.context.doctor import KEPT_S, Doctor


def counting(folder: Path) -> list[str]:
    """A doctor that leaves a mark each time it looks."""
    code = f"import json, pathlib; pathlib.Path({str(folder)!r}).joinpath('marks').open('a').write('x')"
    return [sys.executable, "-c", f"{code}; print(json.dumps({{'exit_code': 0, 'data': [{{'check': 'disk'}}]}}))"]


async def test_all_who_ask_within_half_a_minute_get_the_same_look(tmp_path: Path) -> None:
    now = [1000.0]
    doctor = Doctor(counting(tmp_path), lambda: now[0])
    first, second = await asyncio.gather(doctor.look(), doctor.look())
    assert first == second == {"exit_code": 0, "data": [{"check": "disk"}], "at_s": 1000.0}
    assert (tmp_path / "marks").read_text() == "x"
    now[0] += KEPT_S
    assert (await doctor.look())["at_s"] == now[0] and (tmp_path / "marks").read_text() == "xx"
