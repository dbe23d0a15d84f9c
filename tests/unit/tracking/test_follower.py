"""What a tracker hears of jobs: everything once, across restarts, deaths and refusals, read beside the box's writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance.controller.jobs.events import JobEvents, fail
from appliance.store.database import Database
from appliance.store.objects import files, jobs
from appliance.store.rows import FileRow, JobRow
from appliance.tracking.follower import REFUSED_S, Follower, TrackerFailed, TrackerRefused
from appliance.tracking.jobs import Job, Jobs, Point


@dataclass
class Heard:
    """A tracker that remembers points once. away: it fails. refused: it fails for this job. forbidden: and says that
    it takes no such."""

    name: str = "a tracker"
    away: bool = False
    refused: str = ""
    forbidden: str = ""
    begun: list[str] = field(default_factory=list)
    points: list[tuple[str, str, int]] = field(default_factory=list)
    seen: list[Point] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)

    def wants(self, job: Job) -> bool:
        return job.name != "private"

    def begin(self, job: Job) -> str:
        self._ask(job)
        self.begun.append(job.id)
        return f"https://tracker/{job.id}"

    def log(self, job: Job, points: list[Point]) -> None:
        self._ask(job)
        known = {one.seq for one in self.seen}
        self.points += [(job.id, one.kind, one.step) for one in points if one.seq not in known]
        self.seen += [one for one in points if one.seq not in known]

    def end(self, job: Job) -> None:
        self._ask(job)
        self.ended.append(job)

    def _ask(self, job: Job) -> None:
        if self.away or job.id == self.refused:
            raise TrackerFailed("away")
        if job.id == self.forbidden:
            raise TrackerRefused("entity nobody not found")


@dataclass
class Box:
    db: Database
    folder: Path
    told: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    now_s: float = 0.0

    def job(self, number: int, **fields: Any) -> str:
        row = JobRow(f"ftjob-{number}", "starter", "supervised", "file-1", 7, f"ft:{number}", float(number))
        jobs.insert(self.db, dataclasses.replace(row, phase="queued", **fields))
        return row.id

    def start(self, number: int, **fields: Any) -> str:
        job_id = self.job(number, **fields)
        self.events.started(job_id, ["gpu0"], resumed=False)
        return job_id

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
        def tell(job_id: str, text: dict[str, str]) -> bool:
            self.told.append((job_id, text))
            return True

        store, progress = Jobs(self.folder / "appliance.db"), self.folder / "progress.json"
        return Follower(tracker, store, progress, tell, lambda: self.now_s)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with Database(tmp_path / "appliance.db") as db:
        files.insert(db, FileRow("file-1", "t.jsonl", "fine-tune", 3, "ab" * 32, "processed", 1.0))
        yield Box(db, tmp_path)


def test_a_job_is_told_from_its_begin_to_its_end(box: Box):
    tracker = Heard()
    follower = box.follower(tracker)
    job_id = box.job(1, suffix="mine", resolved={"epochs": 2, "full": False, "options": {"beta": 0.1}, "rank": None})
    follower.round()
    assert tracker.begun == [], "it still waits for a device"
    box.events.started(job_id, ["gpu0"], resumed=False)
    follower.round()
    assert tracker.begun == [job_id] and tracker.points == []
    assert box.told == [(job_id, {"address": f"https://tracker/{job_id}"})]
    box.step(job_id, 1, 2)
    box.validation(job_id, 2)
    follower.round()
    box.step(job_id, 3)
    fail(box.db, job_id, "diverged", "the loss is not finite")
    follower.round()
    follower.round()
    assert tracker.points == [
        (job_id, kind, n) for kind, n in [("train", 1), ("train", 2), ("validation", 2), ("train", 3)]
    ]
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
    assert len(box.told) == 1 and '"jobs": {}' in (box.folder / "progress.json").read_text()


def test_follower_after_a_restart_sends_all_points_of_unended_jobs(box: Box):
    job_id, tracker = box.start(1), Heard()
    box.step(job_id, 1, 2)
    box.follower(tracker).round()
    box.step(job_id, 3)
    box.follower(tracker).round()
    assert [step for _, _, step in tracker.points] == [1, 2, 3] and tracker.begun == [job_id] * 2
    assert len(box.told) == 1, "it is said once where the run is"


def test_steps_that_are_repeated_after_a_sudden_end_are_told_once(box: Box):
    job_id, tracker = box.start(1), Heard()
    follower = box.follower(tracker)
    box.step(job_id, 1, 2, 3)
    box.validation(job_id, 3)
    follower.round()
    box.step(job_id, 2, 3, 4)
    box.validation(job_id, 3)
    follower.round()
    assert [step for _, kind, step in tracker.points if kind == "train"] == [1, 2, 3, 4]
    assert [step for _, kind, step in tracker.points if kind == "validation"] == [3]


def test_a_tracker_that_is_away_hears_everything_later(box: Box):
    job_id, tracker = box.start(1), Heard(away=True)
    follower = box.follower(tracker)
    box.step(job_id, 1, 2)
    follower.round()
    box.step(job_id, *range(3, 700))
    jobs.set_phase(box.db, job_id, "cancelled")
    box.now_s = 2.0
    follower.round()
    (failing,) = follower.failing.values()
    assert (failing.since_s, failing.why, failing.failures, failing.again_s) == (0.0, "away", 2, 4.0)
    tracker.away = False
    follower.round()
    assert not tracker.points, "not before the pause is over"
    box.now_s = 4.0
    follower.round()
    assert not follower.failing
    assert [step for _, _, step in tracker.points] == list(range(1, 700))
    assert [job.phase for job in tracker.ended] == ["cancelled"]


def test_a_job_that_the_tracker_refuses_holds_up_no_other(box: Box):
    first, second = box.start(1), box.start(2)
    tracker = Heard(refused=first)
    follower = box.follower(tracker)
    box.step(first, 1)
    box.step(second, 1)
    for _ in range(3):
        follower.round()
    box.step(second, 2)
    follower.round()
    assert tracker.points == [(second, "train", 1), (second, "train", 2)]


def test_a_new_tracker_hears_of_no_job_that_had_ended_and_of_none_that_it_does_not_want(box: Box):
    ended, private, queued = box.start(1), box.start(2, suffix="private"), box.job(3)
    box.step(ended, 1)
    box.step(private, 1)
    jobs.set_phase(box.db, ended, "succeeded")
    tracker = Heard()
    follower = box.follower(tracker)
    follower.round()
    jobs.set_phase(box.db, queued, "cancelled")  # it never began
    box.step(private, 2)
    follower.round()
    assert tracker.begun == [] and tracker.points == [] and tracker.ended == []


def test_a_database_that_was_restored_is_followed_from_there(box: Box):
    tracker = Heard()
    follower = box.follower(tracker)
    for number in (1, 2, 3):
        box.job(number)
    follower.round()
    box.db.execute("DELETE FROM jobs")
    box.db.execute("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'jobs'")
    follower.round()
    job_id = box.start(4)
    box.step(job_id, 1)
    follower.round()
    assert tracker.points == [(job_id, "train", 1)]


def test_follower_gives_up_a_job_that_is_refused_for_a_day(box: Box):
    first, second = box.start(1), box.start(2)
    tracker = Heard(forbidden=first)
    follower = box.follower(tracker)
    box.step(first, 1)
    box.step(second, 1)
    follower.round()
    assert tracker.points == [(second, "train", 1)] and first not in dict(box.told)
    box.now_s = REFUSED_S + 1
    follower.round()
    assert box.told[-1] == (first, {"refused": "entity nobody not found"})
    tracker.forbidden = ""
    box.now_s *= 2
    follower.round()
    assert first not in tracker.begun
