"""Jobs are exported to a tracker: each point exactly once, despite restarts, failures and concurrent writes."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance import tracking
from appliance.boot.main import ProcessEnded, run_exporter
from appliance.config import ConfigError, TrackingSettings, load_config
from appliance.controller.jobs.events import JobEvents, fail
from appliance.paths import BoxPaths
from appliance.store import files, jobs
from appliance.store.database import Database
from appliance.store.rows import FileRow, JobRow
from appliance.tracking import Follower, Job, Point


@dataclass
class Heard:
    """A fake tracker that drops repeated points. refused: ids of jobs that the tracker rejects."""

    refused: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    seen: list[Point] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)

    def wants(self, job: Job) -> bool:
        return True

    def begin(self, job: Job) -> None:
        if job.id in self.refused:
            raise ValueError("entity nobody not found")
        self.begun.append(job.id)

    def log(self, run: None, points: list[Point]) -> None:
        known = {one.seq for one in self.seen}
        self.seen += [one for one in points if one.seq not in known]

    def end(self, run: None, job: Job) -> None:
        self.ended.append(job)

    @property
    def steps(self) -> list[tuple[str, int]]:
        return [(one.kind, one.step) for one in self.seen]


@dataclass
class Box:
    db: Database
    folder: Path

    def start(self, number: int, **fields: Any) -> str:
        row = JobRow(f"ftjob-{number}", "starter", "supervised", "file-1", 7, f"ft:{number}", float(number))
        jobs.insert(self.db, dataclasses.replace(row, phase="queued", **fields))
        self.events.started(row.id, ["gpu0"])
        return row.id

    @property
    def events(self) -> JobEvents:
        return JobEvents(self.db, self.folder, "local")

    def step(self, job_id: str, *steps: int) -> None:
        for step in steps:
            event = {"event": "metrics", "step": step, "total_steps": 9, "loss": 1 / step, "grad_norm": float("nan")}
            self.events.ingest(
                job_id, event | {"devices": 2, "logps/chosen": -3.5, "timing": {"step": {"training": 1}}}
            )

    def validation(self, job_id: str, step: int) -> None:
        self.events.ingest(job_id, {"event": "validation", "step": step, "loss": 2.0, "mean_token_accuracy": 0.5})

    def follower(self, tracker: Heard) -> Follower:
        return Follower(tracker, self.folder / "appliance.db", self.folder / "heard.since")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with Database(tmp_path / "appliance.db") as db:
        files.insert(db, FileRow("file-1", "t.jsonl", "fine-tune", 3, "ab" * 32, "processed", 1.0))
        yield Box(db, tmp_path)


def test_poll_sends_job_from_begin_to_end(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "EVENTS_AT_ONCE", 5)
    tracker = Heard()
    follower = box.follower(tracker)
    job_id = box.start(1, suffix="mine", resolved={"epochs": 2, "full": False, "options": {"beta": 0.1}, "rank": None})
    follower.poll()
    assert tracker.begun == [job_id] and tracker.seen == []
    box.step(job_id, 1, 2)
    box.validation(job_id, 2)
    follower.poll()
    box.step(job_id, 3, *range(4, 20))
    fail(box.db, job_id, "diverged", "the loss is not finite")
    follower.poll()
    follower.poll()
    expected = [("train", 1), ("train", 2), ("validation", 2), *(("train", step) for step in range(3, 20))]
    assert tracker.steps == expected
    assert tracker.seen[0].values == {"train/loss": 1.0, "train/devices": 2.0, "train/logps/chosen": -3.5}
    assert tracker.seen[2].values == {"validation/loss": 2.0, "validation/mean_token_accuracy": 0.5}
    (ended,) = tracker.ended
    assert (ended.phase, ended.error, ended.name) == ("failed", "the loss is not finite", "mine")
    assert ended.params == {
        "model": "starter",
        "method": "supervised",
        "seed": "7",
        "training_file": "file-1",
        "training_file_sha256": "ab" * 32,
        "epochs": "2",
        "full": "false",
        "options.beta": "0.1",
    }


def test_poll_sends_repeated_steps_once(box: Box):
    job_id, tracker = box.start(1), Heard()
    follower = box.follower(tracker)
    box.step(job_id, 1, 2, 3)
    box.validation(job_id, 3)
    follower.poll()
    box.step(job_id, 2, 3, 4)
    box.validation(job_id, 3)
    follower.poll()
    assert tracker.steps == [("train", 1), ("train", 2), ("train", 3), ("validation", 3), ("train", 4)]


def test_poll_retries_refused_job_without_blocking_others(box: Box, capsys):
    first, second = box.start(1), box.start(2)
    tracker = Heard(refused={first})
    follower = box.follower(tracker)
    for _ in range(2):
        follower.poll()
    assert capsys.readouterr().err.count("entity nobody") == 1
    box.step(first, 1)
    box.step(second, 1)
    jobs.set_phase(box.db, first, "cancelled")
    jobs.set_phase(box.db, second, "succeeded")
    follower.poll()
    assert [job.id for job in tracker.ended] == [second]
    with pytest.raises(RuntimeError, match="entity"):
        follower.poll()  # the tracker accepted no job: the process ends, and the next process retries
    tracker.refused.clear()
    box.follower(tracker).poll()
    assert {job.id for job in tracker.ended} == {first, second} and len(tracker.seen) == 2


def test_poll_of_a_new_tracker_skips_ended_jobs(box: Box):
    ended, running = box.start(1), box.start(2)
    jobs.set_phase(box.db, ended, "succeeded")
    tracker = Heard()
    box.follower(tracker).poll()
    assert tracker.begun == [running]


def test_tracking_script_imports_only_standard_library():
    """Users may run the script in another interpreter; `-S` hides the installed packages."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", "import runpy, sys; runpy.run_path(sys.argv[1])",
                           tracking.__file__], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture
def paths(tmp_path: Path) -> BoxPaths:
    (tmp_path / "shm").mkdir()
    paths = BoxPaths.of(tmp_path / "data", tmp_path / "shm")
    paths.create()
    Database(paths.database).close()
    return paths


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
async def test_exporter_without_tracker_library_ends_with_reason(paths: BoxPaths, tracker):
    settings = TrackingSettings(mlflow_uri="http://127.0.0.1:9", wandb_mode="offline", python=sys.executable)
    with pytest.raises(ProcessEnded, match=f"{tracker}.*docs/tracking.md"):
        await run_exporter(tracker, settings, paths, {"PATH": os.environ["PATH"], "WANDB_MODE": "online"})


@pytest.mark.parametrize(
    ("text", "mode", "fault"),
    [("WANDB_API_KEY=k\n", 0o644, "open to other users"), ("# key\nAWS_SECRET_ACCESS_KEY=x\n", 0o600, "AWS_SECRET")],
)
async def test_exporter_with_bad_credentials_file_ends_with_reason(paths, tmp_path, text, mode, fault):
    file = tmp_path / "secrets"
    file.write_text(text)
    file.chmod(mode)
    settings = TrackingSettings(mlflow_uri="http://127.0.0.1:9", credentials_file=str(file))
    with pytest.raises(ProcessEnded, match=fault):
        await run_exporter("mlflow", settings, paths, {"PATH": os.environ["PATH"]})


def test_tracking_is_off_by_default_and_rejects_url_credentials(tmp_path: Path):
    assert TrackingSettings().trackers == ()
    file = tmp_path / "appliance.toml"
    file.write_text('[tracking]\nmlflow_uri = "https://me:secret@mlflow.example"\n')
    with pytest.raises(ConfigError, match="without credentials.*credentials_file") as refused:
        load_config(file)
    assert "me:secret" not in str(refused.value)
