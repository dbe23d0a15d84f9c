"""`check_apart` checks a file in a separate process, with the same result as in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.controller.conftest import chat_lines
from train.data_checks import process
from train.data_checks.check import check_training_file
from train.data_checks.process import check_apart


@pytest.mark.parametrize("data", [chat_lines(), b"{}\n" * 3, b""])
async def test_check_apart_returns_same_report_as_in_process(tmp_path: Path, data: bytes):
    source, chat = tmp_path / "in", tmp_path / "chat"
    source.write_bytes(data)
    apart = await check_apart(source, chat_path=chat)
    assert (apart, chat.exists()) == (check_training_file(source), apart.ok)
    assert not chat.exists() or len(chat.read_text().splitlines()) == apart.n_examples


async def test_check_apart_whose_process_is_killed_reports_a_bad_file(tmp_path: Path, monkeypatch):
    source, killed = tmp_path / "in", tmp_path / "python"
    source.write_bytes(chat_lines())
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(process.sys, "executable", str(killed))
    report = await check_apart(source)
    assert not report.ok and "SIGKILL" in report.errors[0][1]


async def test_check_apart_raises_oserror_for_missing_file_or_disk(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        await check_apart(tmp_path / "gone")
    (tmp_path / "in").write_bytes(chat_lines())
    with pytest.raises(NotADirectoryError):
        await check_apart(tmp_path / "in", chat_path=tmp_path / "in" / "chat")


async def test_check_apart_ends_its_process_when_cancelled(tmp_path: Path, monkeypatch):
    pid, program = tmp_path / "pid", tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.new && mv {pid}.new {pid}\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(process.sys, "executable", str(program))
    checking = asyncio.create_task(check_apart(tmp_path / "in"))
    while not pid.exists():
        await asyncio.sleep(0.01)
    checking.cancel()
    await asyncio.wait([checking])
    assert checking.cancelled() and not Path(f"/proc/{pid.read_text().strip()}").exists()
