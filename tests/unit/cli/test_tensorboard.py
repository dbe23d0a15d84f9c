"""`appliance job tensorboard`: which files it shows, what it says where it cannot, and that Ctrl-C ends it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import run


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for job_id in ("ftjob-a", "ftjob-b"):
        (tmp_path / "data, of a: box" / "jobs" / job_id / "tb").mkdir(parents=True)
    (tmp_path / "data, of a: box" / "jobs" / "ftjob-waits").mkdir()
    return tmp_path / "data, of a: box"


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command line that takes the place of this process, and the folder where it does."""
    found: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: found.append((arguments, os.getcwd())))
    monkeypatch.chdir(os.getcwd())  # and back afterwards
    return found


def test_all_jobs_or_those_that_are_named(data_dir: Path, replaced: list[Any]):
    assert run("job", "tensorboard", "--data-dir", str(data_dir)).exit_code == 0
    assert run("job", "tensorboard", "ftjob-b", "ftjob-a", "--port", "0", "--data-dir", str(data_dir)).exit_code == 0
    assert [folder for _, folder in replaced] == [str(data_dir / "jobs")] * 2
    assert replaced[0][0][-3:] == ["--logdir=.", "--port=6006", "--host=localhost"]
    assert replaced[1][0][-3:] == ["--logdir_spec=ftjob-b:ftjob-b,ftjob-a:ftjob-a", "--port=0", "--host=localhost"]


@pytest.mark.parametrize("job_id", ["ftjob-none", "ftjob-waits", "../jobs/ftjob-a", "ftjob-a/../ftjob-b"])
def test_a_job_without_curves_is_said(data_dir: Path, replaced: list[Any], job_id: str):
    result = run("job", "tensorboard", job_id, "--data-dir", str(data_dir))
    assert result.exit_code == 3 and "no curves" in result.output and replaced == []


def test_a_directory_without_a_box_is_said(tmp_path: Path, replaced: list[Any]):
    result = run("job", "tensorboard", "--data-dir", str(tmp_path / "none"))
    assert result.exit_code == 3 and "no job has run" in result.output and replaced == []


def test_without_the_package_it_says_where_the_files_are(
    data_dir: Path, replaced: list[Any], monkeypatch: pytest.MonkeyPatch
):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    result = run("job", "tensorboard", "--data-dir", str(data_dir))
    assert result.exit_code == 2 and replaced == []
    assert "pip install tensorboard" in result.output and f"{data_dir}/jobs" in result.output


def test_it_serves_the_curves_and_an_interrupt_ends_it(data_dir: Path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for job_id in ("ftjob-a", "ftjob-b"):
        writer = EventFileWriter(str(data_dir / "jobs" / job_id / "tb"))
        loss = Summary(value=[Summary.Value(tag="train/loss", simple_value=2.5)])
        writer.add_event(Event(step=1, wall_time=1.0, summary=loss))
        writer.close()
    command = [sys.executable, "-m", "appliance.cli.main", "job", "tensorboard", "ftjob-b", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://localhost:" in line)
        url = next(word for word in line.split() if word.startswith("http://localhost:"))
        with urllib.request.urlopen(f"{url}data/runs", timeout=30) as answer:
            assert answer.read() == b'["ftjob-b/tb"]'
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
