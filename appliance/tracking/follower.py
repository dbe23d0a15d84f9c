"""Sends the figures of jobs to one tracker. The file keeps which jobs are not sent to their end, nothing else: a new
process sends all points of these again, and each tracker takes a point that it has once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from appliance.tracking.jobs import Job, Jobs, Point
from runtime.replace_file import replace_file

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
REFUSED_S = 24 * 3600.0  # time that an administrator has to give the box's key its rights


class TrackerFailed(RuntimeError):
    """The tracker is away, slow or not installed; it is called again later."""


class TrackerRefused(TrackerFailed):
    """The tracker takes no run of this job, such as one of a team that the box's key may not write to."""


class Tracker(Protocol):
    """Each method raises TrackerFailed, and then `begin` is called again and gets all points again."""

    name: str

    def wants(self, job: Job) -> bool: ...

    def begin(self, job: Job) -> str:
        """Begins the job's run, or resumes the one that there is. Returns its address for people."""
        ...

    def log(self, job: Job, points: list[Point]) -> None: ...

    def end(self, job: Job) -> None: ...


@dataclass
class Followed:
    """What this process has sent of a job: up to event `seq`, with the last step of each kind. A step that a job
    repeats after a sudden end is sent once."""

    begun: bool = False
    seq: int = 0
    last: dict[str, int] = field(default_factory=dict)


@dataclass
class Failing:
    """Why a job cannot be sent, how often in a row and since when (Unix seconds); not tried before again_s."""

    since_s: float
    failures: int = 0
    again_s: float = 0.0
    why: str = ""


class Follower:
    """path: of the file. tell(job's id, {"address" or "refused": text}): whether the box has noted it in the job's
    events."""

    def __init__(
        self,
        tracker: Tracker,
        jobs: Jobs,
        path: Path,
        tell: Callable[[str, dict[str, str]], bool],
        clock: Callable[[], float] = time.time,
    ):
        self._tracker, self._jobs, self._path, self._tell, self._clock = tracker, jobs, path, tell, clock
        self._followed: dict[str, Followed] = {}
        self.failing: dict[str, Failing] = {}
        # seen: number of the newest job; jobs: by id, the address in the job's events
        self._state: dict[str, Any] = {"seen": None, "jobs": {}}
        if path.exists():
            self._state = json.loads(path.read_text())

    def round(self) -> None:
        """Sends what is new. Raises OSError, sqlite3.Error."""
        newest, seen = self._jobs.newest(), self._state["seen"]
        if newest != seen:  # less, where an older copy of the database was restored
            found = self._jobs.unfinished() if seen is None else self._jobs.made_since(seen)
            self._state["jobs"] = {**dict.fromkeys(found, ""), **self._state["jobs"]}
            self._state["seen"] = newest
            self._write()
        for job_id in list(self._state["jobs"]):
            failing = self.failing.get(job_id)
            if failing is not None and self._clock() < failing.again_s:
                continue
            try:
                self._follow(job_id)
                self.failing.pop(job_id, None)
            except TrackerFailed as error:
                self._followed.pop(job_id, None)
                self._fail(job_id, error)

    def _follow(self, job_id: str) -> None:
        job = self._jobs.find(job_id)  # before its events: if it has ended, they are all there
        if job is None or not self._tracker.wants(job) or (job.finished_s and not job.started):
            self._forget(job_id)
            return
        if not job.started:
            return
        at = self._followed.setdefault(job_id, Followed())
        if not at.begun:
            address = self._tracker.begin(job)
            at.begun = True
            if address != self._state["jobs"][job_id] and self._tell(job_id, {"address": address}):
                self._state["jobs"][job_id] = address
                self._write()
        while points := self._jobs.points(job_id, at.seq):
            new = []
            for point in points:
                if point.step > at.last.get(point.kind, -1):
                    at.last[point.kind] = point.step
                    new += [point] if point.values else []
            self._tracker.log(job, new)
            at.seq = points[-1].seq
        if job.finished_s:
            self._tracker.end(job)
            self._forget(job_id)

    def _fail(self, job_id: str, error: TrackerFailed) -> None:
        now_s = self._clock()
        failing = self.failing.setdefault(job_id, Failing(now_s))
        failing.again_s = now_s + min(LONGEST_PAUSE_S, 2.0 ** min(failing.failures, 10))
        failing.failures, failing.why = failing.failures + 1, str(error)
        log.warning("%s cannot be told of the job: %s", self._tracker.name, error, extra={"job_id": job_id})
        if isinstance(error, TrackerRefused) and now_s - failing.since_s > REFUSED_S:
            if self._tell(job_id, {"refused": str(error)}):
                self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        del self._state["jobs"][job_id]
        self._followed.pop(job_id, None)
        self.failing.pop(job_id, None)
        self._write()

    def _write(self) -> None:
        replace_file(self._path, json.dumps(self._state).encode(), durable=True)
