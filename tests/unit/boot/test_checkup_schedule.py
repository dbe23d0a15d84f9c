"""When a running box lets the doctor look, and what it says of it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from appliance.boot.checkup_schedule import EVERY_S, CheckupSchedule, looked_at_s, read_findings
from appliance.boot.scheduled_process import ProcessFailed


def finding(check: str, state: str = "warn") -> dict[str, str]:
    return {"check": check, "state": state, "found": "1", "wanted": "2", "remedy": "more"}


class Doctor:
    def __init__(self, newest: Path):
        self.newest, self.times, self.finds = newest, 0, [finding("swap"), finding("clock", "ok")]

    async def start(self) -> asyncio.subprocess.Process:
        self.times += 1
        self.newest.write_text(json.dumps({"exit_code": 2, "data": self.finds}))
        return await asyncio.create_subprocess_exec("true")


async def test_after_each_start_and_once_a_day_and_only_what_is_new_is_logged(tmp_path: Path, caplog):
    doctor, now_s = Doctor(tmp_path / "last-checkup.json"), 5.0
    schedule = CheckupSchedule(doctor.newest, tmp_path / "doctor.log", doctor.start, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING):
        await schedule.look()
        await schedule.look()
    assert doctor.times == 1
    assert caplog.messages == ["the doctor on swap: found 1, wanted 2; more"]
    doctor.finds.append(finding("disk free", "fail"))
    now_s += EVERY_S
    with caplog.at_level(logging.WARNING):
        await schedule.look()
    assert doctor.times == 2 and [one["check"] for one in read_findings(doctor.newest)] == ["swap", "disk free"]
    assert caplog.messages[1:] == ["the doctor on disk free: found 1, wanted 2; more"]


async def test_one_that_fails_says_why_and_is_tried_again(tmp_path: Path):
    log = tmp_path / "doctor.log"

    async def start() -> asyncio.subprocess.Process:
        with open(log, "ab") as said:
            words = "import sys; print('no /proc', file=sys.stderr); sys.exit(1)"
            return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", words, stderr=said)

    schedule = CheckupSchedule(tmp_path / "last-checkup.json", log, start)
    for _ in range(2):
        with pytest.raises(ProcessFailed, match="no /proc"):
            await schedule.look()


@pytest.mark.parametrize("text", ["", "[]", '{"data": 3}', '{"data": [3]}', '{"data": [{"check": "x"}]}'])
def test_a_file_that_is_not_ours_to_understand_has_no_findings(tmp_path: Path, text):
    (tmp_path / "x").write_text(text)
    assert read_findings(tmp_path / "x") == [] and looked_at_s(tmp_path / "x") is None
