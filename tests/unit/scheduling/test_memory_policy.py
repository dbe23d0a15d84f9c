"""What is given back when the host's memory is short, in which order, and how it comes back; on numbers and a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.memory.memory_policy import CALM_S, Action, Holdings, MemoryState, decide
from scheduler.devices.host_reading import MemoryReading

GB = 10**9
RESERVE = GB


@dataclass
class Box:
    """A host of 24 GB. What the box gives back becomes available; `others` take what they take."""

    others: int
    pool: int = GB
    versions: int = 2 * GB
    sleepers: int = 2
    jobs: tuple[str, ...] = ("job-last", "job-first")  # first to yield first
    engines: dict[str, int] = field(default_factory=lambda: {"chat": 2, "code": 1})
    now_s: float = 1000.0
    state: MemoryState = MemoryState()
    log: list[Action] = field(default_factory=list)

    @property
    def available(self) -> int:
        own = self.pool + self.versions + self.sleepers * GB // 4
        own += len(self.jobs) * 3 * GB + sum(self.engines.values()) * GB
        return 24 * GB - self.others - own

    @property
    def holdings(self) -> Holdings:
        return Holdings(self.pool, self.versions, self.sleepers, self.jobs)

    def run(self, seconds: float) -> list[str]:
        """Half a second at a time; what was done, in words."""
        before = len(self.log)
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            reading = MemoryReading(24 * GB, self.available)
            self.state, action = decide(reading, self.holdings, self.state, self.now_s, RESERVE)
            if action is not None:
                self.log.append(action)
                self.carry_out(action)
            self.now_s += 0.5
        return [f"{'+' if a.back else '-'}{a.kind}{' ' + a.what if a.what else ''}" for a in self.log[before:]]

    def carry_out(self, action: Action) -> None:
        match action.kind, action.back:
            case "pool", False:
                self.pool = 0
            case "versions", False:
                self.versions -= action.nbytes
            case "sleeper", False:
                self.sleepers = self.state.sleepers or 0
            case "job", False:
                self.jobs = tuple(job for job in self.jobs if job != action.what)
            case "job", True:
                self.jobs = (action.what, *self.jobs)


def test_it_gives_back_in_the_stated_order_no_more_than_is_needed():
    box = Box(others=4 * GB)
    room = box.available
    box.others += room - RESERVE // 2  # half of the reserve is left
    assert box.run(30) == ["-pool"]  # half of the reserve and a GB are enough
    assert box.run(60) == [] and not box.state.holds_back
    box.others += box.available - RESERVE // 2
    assert box.run(30) == ["-versions"] and box.versions == GB  # what was lacking, not all of it
    box.others += box.available
    assert box.run(30) == ["-versions"] and box.versions == 0, "there is the reserve again: nobody has to go"


def test_decide_under_a_program_that_takes_all_gives_all_but_engines_and_takes_it_back():
    box = Box(others=4 * GB)
    box.others += 40 * GB
    gone = box.run(60)
    assert gone == ["-pool", "-versions", "-sleeper", "-sleeper", "-job job-last", "-job job-first"]
    assert "memory is short" in box.log[0].why and "GB of this machine available" in box.log[0].why
    assert box.run(600) == [], "nothing is left to give, and nothing is done twice"
    box.others = 4 * GB
    began_s = box.now_s
    back = box.run(120)
    assert back == ["+job job-first", "+job job-last", "+sleeper"]
    assert not box.state.holds_back and box.state.jobs == ()
    assert box.now_s - began_s <= 120


def test_between_the_marks_nothing_moves():
    """What is given back at the reserve comes back at half as much again: no to and fro in between."""
    box = Box(others=4 * GB, pool=0, versions=0, sleepers=0, engines={}, jobs=("a",))
    box.others += box.available - RESERVE // 2
    assert box.run(5) == ["-job a"]
    box.others += box.available - int(RESERVE * 1.2)
    assert box.run(600) == [] and box.state.jobs == ("a",)
    box.others -= 5 * GB
    assert box.run(CALM_S + 2) == ["+job a"]


def test_decide_gives_back_a_suspended_job_while_another_waits_for_more_than_there_is():
    reading, waits = MemoryReading(24 * GB, 10 * GB), Holdings(job_wanted=20 * GB)
    state, action = decide(reading, waits, MemoryState(jobs=("small",)), 0.0, RESERVE)
    assert action is None
    _, action = decide(reading, waits, state, CALM_S, RESERVE)
    assert action is not None and (action.back, action.what) == (True, "small")
