"""Tells one tracker of jobs, from where it left off: nothing lost, nothing twice."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from appliance.tracking.errors import TrackerFailed, TrackerRefused
from appliance.tracking.store_reader import Job, Point, StoreReader
from runtime.replace_file import replace_file

log = logging.getLogger(__name__)

Tell = Callable[[str, str, str], bool]
"""(job's id, tracker, address) -> whether the box has noted it."""
TellRefused = Callable[[str, str, str], bool]
"""(job's id, tracker, its reason) -> whether the box has noted that the tracker is not asked again."""

MOST_REFUSALS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 6, 60.0, 3600.0
"""After 1, 5, 21 minutes, and then each hour: whoever may give the box's key its rights has 2 hours and more for it."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_RETRIES_PART = 10
"""Jobs that fail are tried for one second of so many: each attempt may wait for its server as long as that lets it."""


@dataclass(slots=True)
class Failing:
    """A job that the tracker could not be told of, how often in a row and since when; not tried before again_s."""

    since_s: float
    why: str = ""
    failures: int = 0
    again_s: float = 0.0


class Tracker(Protocol):
    """What is told of jobs. Each method raises TrackerFailed, and is then called again later with the same."""

    name: str

    def wants(self, job: Job) -> bool:
        """Whether it is to hear of the job at all."""
        ...

    def begin(self, job: Job) -> tuple[str, int | None]:
        """Begin the job's run, or take up the one that there is. Returns its address for people, and behind which event
        it wants to hear what follows; None: behind what it was told last."""
        ...

    def log(self, job: Job, points: list[Point]) -> None: ...

    def end(self, job: Job) -> None:
        """The job has ended and everything was told."""
        ...


@dataclass
class Followed:
    """How far the tracker was told of a job. seq: the last event; train, validation: the last step of each. told: where
    the box has noted that the run is. refusals: how often in a row it took no run of the job; again_s: it is not asked
    before then."""

    seq: int = 0
    train: int = -1
    validation: int = -1
    told: str = ""
    refusals: int = 0
    again_s: float = 0.0


@dataclass
class Progress:
    """seen: the number of the newest job that was found. None: the tracker is new to the box. jobs: those that have not
    ended, or are not told to their end."""

    seen: int | None = None
    jobs: dict[str, Followed] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        try:
            table: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        return cls(table["seen"], {job_id: Followed(**one) for job_id, one in table["jobs"].items()})

    def write(self, path: Path) -> None:
        replace_file(path, json.dumps(asdict(self)).encode(), durable=True)


class Follower:
    """path: the file that keeps how far the tracker is. A step that is repeated (after a sudden end) is told once."""

    def __init__(
        self,
        tracker: Tracker,
        store: StoreReader,
        path: Path,
        tell: Tell,
        tell_refused: TellRefused,
        clock: Callable[[], float] = time.time,
    ):
        self._tracker, self._store, self._path, self._tell = tracker, store, path, tell
        self._tell_refused, self._clock = tell_refused, clock
        self._progress = Progress.read(path)
        self._address: dict[str, str] = {}  # of the runs begun in this process
        self._failing: dict[str, Failing] = {}
        self._retry_s = 0.0  # none that fails is tried before then

    def round(self) -> None:
        """Tell what is new. Raises OSError, sqlite3.Error. Those that fail come last and have pauses of their own: a
        job whose project is none, or a hundred of them, hold up no other's. All paused for a minute because of one."""
        self._look_for_jobs()
        waiting = self._store.not_begun()
        now_s = self._clock()
        begun = [job_id for job_id, at in self._progress.jobs.items() if job_id not in waiting and at.again_s <= now_s]
        for job_id in sorted(begun, key=self._again_s):
            began_s = self._clock()
            if job_id in self._failing and began_s < max(self._failing[job_id].again_s, self._retry_s):
                continue
            try:
                self._follow(job_id, self._progress.jobs[job_id])
            except TrackerRefused as error:
                self._address.pop(job_id, None)
                self._refused(job_id, self._progress.jobs[job_id], str(error))
            except TrackerFailed as error:
                self._address.pop(job_id, None)  # its run may be gone there: it is looked for again
                self._fails(job_id, str(error), began_s)
                continue
            if self._failing.pop(job_id, None) is not None:
                self._retry_s = 0.0
                for other in self._failing.values():
                    other.again_s = 0.0  # the tracker may be back

    @property
    def failing(self) -> list[Failing]:
        """What the tracker could not be told of, the longest failing job first."""
        for job_id in self._failing.keys() - self._progress.jobs.keys():
            del self._failing[job_id]
        return sorted(self._failing.values(), key=lambda one: one.since_s)

    def _again_s(self, job_id: str) -> float:
        failing = self._failing.get(job_id)
        return -1.0 if failing is None else failing.again_s

    def _fails(self, job_id: str, why: str, began_s: float) -> None:
        now_s = self._clock()
        failing = self._failing.setdefault(job_id, Failing(now_s))
        failing.again_s = now_s + min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** min(failing.failures, 10))
        failing.failures, failing.why = failing.failures + 1, why
        self._retry_s = now_s + min(_LONGEST_RETRY_S, _RETRIES_PART * (now_s - began_s))
        log.warning(
            "%s could not be told of the job, time %d in a row: %s",
            self._tracker.name,
            failing.failures,
            why,
            extra={"job_id": job_id},
        )

    def _refused(self, job_id: str, at: Followed, why: str) -> None:
        """It is asked again later, with a growing pause, and not for ever: the job's owner hears of the end of it."""
        at.refusals += 1
        at.again_s = self._clock() + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 4 ** (at.refusals - 1))
        log.warning("%s refuses the job (%d times): %s", self._tracker.name, at.refusals, why, extra={"job_id": job_id})
        if at.refusals >= MOST_REFUSALS and self._tell_refused(job_id, self._tracker.name, why):
            self._forget(job_id)
        else:
            self._progress.write(self._path)

    def _look_for_jobs(self) -> None:
        """A tracker that is new hears of the jobs that have not ended yet."""
        newest, known = self._store.newest_job(), self._progress.seen
        if newest == known:
            return
        found = self._store.unfinished() if known is None else self._store.made_since(known)
        for job_id in found:
            self._progress.jobs.setdefault(job_id, Followed())
        self._progress.seen = newest  # also where it is less: an older copy of the database was restored
        self._progress.write(self._path)

    def _follow(self, job_id: str, at: Followed) -> None:
        job = self._store.job(job_id)  # before its events: if it has ended, they are all there
        if job is None or not job.started or not self._tracker.wants(job):
            self._forget(job_id)
            return
        if job_id not in self._address:
            self._begin(job, at)
            at.refusals = 0
        if at.told != self._address[job_id] and self._tell(job_id, self._tracker.name, self._address[job_id]):
            at.told = self._address[job_id]
            self._progress.write(self._path)
        while points := self._store.points(job_id, at.seq):
            if new := _new(points, at):
                self._tracker.log(job, new)
            _passed(points, at)
            self._progress.write(self._path)
        if job.finished:
            self._tracker.end(job)
            log.info("%s has all of the job", self._tracker.name, extra={"job_id": job_id})
            self._forget(job_id)

    def _begin(self, job: Job, at: Followed) -> None:
        address, behind = self._tracker.begin(job)
        if behind is not None and behind != at.seq:
            at.seq, at.train, at.validation = 0, -1, -1
            while points := [one for one in self._store.points(job.id, at.seq) if one.seq <= behind]:
                _passed(points, at)
        self._address[job.id] = address

    def _forget(self, job_id: str) -> None:
        del self._progress.jobs[job_id]
        self._address.pop(job_id, None)
        self._progress.write(self._path)


def _new(points: list[Point], at: Followed) -> list[Point]:
    """Those of steps that the tracker has not heard of."""
    last = {"train": at.train, "validation": at.validation}
    new = []
    for point in points:
        if point.step > last[point.kind]:
            last[point.kind] = point.step
            new += [point] if point.values else []
    return new


def _passed(points: list[Point], at: Followed) -> None:
    at.seq = points[-1].seq
    at.train = max([at.train, *(one.step for one in points if one.kind == "train")])
    at.validation = max([at.validation, *(one.step for one in points if one.kind == "validation")])
