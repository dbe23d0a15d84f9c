"""kill -9 of the controller, of engines and of ranks around the steps of real hand-overs, under load.

Each round changes the mode, waits until a sampled step of the hand-over is about to begin, runs, or has just ended,
and kills a sampled process. Then the box must come to rest in the wanted mode by itself. `CRASH_KILLS` and
`CRASH_SEED` in the environment set how many rounds and which ones; both are printed with the counts.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter

import pytest

from appliance.demo.load_generator import Load
from tests.e2e.box_support import WholeBox, gsm8k, wait_for
from tests.train_support.tiny import make_model_dir

KILLS = int(os.environ.get("CRASH_KILLS", "24"))
SEED = int(os.environ.get("CRASH_SEED", time.time()))
DEVICES = 4
MODES = (("serve",), ("train",), ("split", "--train", "2"), ("split", "--train", "3"))
VICTIMS = ("controller", "engine", "rank")
WHEN = ("before", "in", "after")
SETTLE_S = 600  # against hanging only: a restart of the controller takes minutes on a machine under heavy load

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


class Rounds:
    """The box under test, and what was seen of it."""

    def __init__(self, box: WholeBox, job_id: str):
        self.box, self.job_id = box, job_id
        self.random = random.Random(SEED)
        self.kills: Counter[tuple[str, str, str]] = Counter()  # victim, when, verb
        self.journal = sqlite3.connect(f"file:{box.data_dir}/appliance.db?mode=ro", uri=True)

    def steps(self, after: int) -> list[tuple[str, str]]:
        """(verb, state) of the steps of hand-overs above this number, in the order they began."""
        return self.journal.execute(
            "SELECT value ->> '$.verb', value ->> '$.state' FROM handovers, json_each(steps) WHERE handovers.id > ? "
            "ORDER BY handovers.id, key",
            [after],
        ).fetchall()

    def last(self) -> int:
        return int(self.journal.execute("SELECT max(id) FROM handovers").fetchone()[0] or 0)

    def open_handovers(self) -> int:
        return self.journal.execute("SELECT count(*) FROM handovers WHERE ended_s IS NULL").fetchone()[0]

    def play(self, number: int, mode: tuple[str, ...]) -> None:
        victim, when, nth = self.random.choice(VICTIMS), self.random.choice(WHEN), self.random.randrange(6)
        last, reached = self.last(), self.step_reached()
        self.box.note_segments()
        self.box.run("mode", "set", *mode, "--no-wait")
        pressed_s = time.monotonic()
        verb = self.wait_for_step(last, when, nth)
        pid = self.pick(victim)
        if pid is None:
            victim, pid = "controller", self.pick("controller")
        os.kill(pid, signal.SIGKILL)
        self.kills[victim, when, verb] += 1
        began_s = time.monotonic()
        self.settle(mode, reached)
        print(
            f"{number:3d} {' '.join(mode):16s} {victim:10s} {when:6s} {verb:14s} after "
            f"{began_s - pressed_s:5.1f} s, settled in {time.monotonic() - began_s:5.1f} s",
            flush=True,
        )

    def table(self) -> str:
        """Kills by victim and step, as before/in/after."""
        rows = sorted({(victim, verb) for victim, _, verb in self.kills})
        told = [
            f"  {victim:10s} {verb:14s} " + "/".join(str(self.kills[victim, when, verb]) for when in WHEN)
            for victim, verb in rows
        ]
        return "\n".join([f"kills {self.kills.total()} (before/in/after the step):", *told])

    def wait_for_step(self, last: int, when: str, nth: int) -> str:
        """Returns the verb when the n-th step is about to begin, runs, or has ended; or the hand-over is over."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            steps = self.steps(last)
            if when == "before" and len(steps) == nth and self.open_handovers():
                return f"step {nth}"
            if when != "before" and len(steps) > nth and (steps[nth][1] == "doing") == (when == "in"):
                return steps[nth][0]
            if steps and not self.open_handovers():
                return steps[-1][0]
            time.sleep(0.002)
        return "nothing to do"

    def pick(self, victim: str) -> int | None:
        pattern = {"controller": "controller.log", "engine": "engine-*.log", "rank": f"{self.job_id}-rank*.log"}[victim]
        pids = self.box.pids_logging_to(pattern)
        return self.random.choice(pids) if pids else None

    def step_reached(self) -> int:
        row = self.journal.execute("SELECT max(step) FROM job_metrics WHERE job_id = ?", [self.job_id]).fetchone()
        return row[0] or 0

    def settle(self, mode: tuple[str, ...], reached: int) -> None:
        """Until the box is in the wanted mode: the devices as it wants them, one holder each, no process too many."""
        wait_for(self.box.answers, "the endpoint", SETTLE_S)
        wait_for(lambda: self.problem(mode) == "" and self.problem(mode) == "", "the box to settle", SETTLE_S)
        assert self.box.ask("mode", "show")["policy"] == mode[0]
        if mode[0] != "serve":
            wait_for(lambda: self.step_reached() > reached, "a step of the job", SETTLE_S)
        assert self.box.job(self.job_id)["phase"] in ("running", "suspended", "queued")

    def problem(self, mode: tuple[str, ...]) -> str:
        if self.open_handovers():
            return "a hand-over is under way"
        now = self.box.tried("status")
        if now is None:
            return "the controller does not answer yet"
        holders = [device["holder"] for device in now["devices"] if device["holder"]]
        training = sum(holder["kind"] == "job" for holder in holders)
        wanted = {"serve": 0, "train": DEVICES}.get(mode[0]) if mode[0] != "split" else int(mode[2])
        if training > wanted or (training == 0) != (wanted == 0):
            return f"{training} devices train"
        awake = [r for r in now["replicas"] if r["state"] not in ("asleep", "dead")]
        used = [device for replica in awake for device in replica["devices"]]
        assert len(used) == len(set(used)), f"a device has two engines: {awake}"
        ranks = self.box.pids_logging_to(f"{self.job_id}-rank*.log")
        if len(ranks) != training:
            return f"{len(ranks)} ranks on {training} devices"
        known = {f"engine-{replica['id']}.log" for replica in now["replicas"]}
        engines = {path.name for path in self.engine_logs()}
        return f"engines nobody knows: {engines - known}" if engines - known else ""

    def engine_logs(self) -> set:
        folder = self.box.data_dir / "logs"
        return {path for path in folder.glob("engine-*.log") if self.box.pids_logging_to(path.name)}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    one = WholeBox(tmp_path_factory.mktemp("crash"))
    # Here it is not the devices that kill.
    (one.data_dir / "appliance.toml").write_text("[scheduler]\ndevice_deaths = 0\n")
    try:
        one.run("up", "--detach", "--port", str(one.port), "--devices", str(DEVICES))
        one.key = one.ask("key", "create", "--name", "crash", "--scope", "admin", "--scope", "inference")["key"]
        yield one
        one.run("down")
        assert one.left() == []
        wait_for(lambda: not one.segments_left(), "segments without a process to be gone", 10)
    finally:
        one.destroy()


def test_kills_around_the_steps_of_hand_overs(box, capsys):
    tiny = make_model_dir(box.data_dir / "tiny", hidden_size=128, intermediate_size=256)
    assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
    (box.data_dir / "train.jsonl").write_bytes(gsm8k("train", 2000))
    options = "--epochs 50 --batch-size 4 --set snapshot_every_s=2 --set max_length=256"
    job_id = box.submit("tiny", box.data_dir / "train.jsonl", options)
    rounds = Rounds(box, job_id)
    with capsys.disabled():
        print(f"\nseed {SEED}, {KILLS} kills", flush=True)
        mode, violations = None, 1
        with Load(box.url, box.key, "tiny", workers=2, max_tokens=16) as load:
            try:
                wait_for(rounds.step_reached, "the first step of the job", SETTLE_S)
                for number in range(1, KILLS + 1):
                    mode = rounds.random.choice([other for other in MODES if other != mode])
                    rounds.play(number, mode)
                box.run("mode", "set", "serve", "--wait")
                violations = 0
            except BaseException as error:
                print(f"round {rounds.kills.total()}: {error!r}; {rounds.problem(mode or MODES[0])}", flush=True)
                box.destroy()  # else the load would wait for an engine that nobody starts
                raise
            finally:
                print(f"{rounds.table()}\nviolations {violations}", flush=True)
        report = load.report()
        print(
            f"requests {report.requests}: {report.dropped} ended with an error, {report.truncated} cut off in "
            f"silence, {report.duplicated} answered twice; errors {report.errors}",
            flush=True,
        )
    assert (report.truncated, report.duplicated) == (0, 0)
    # Only a killed engine costs requests, at most those that it was answering.
    killed_engines = sum(count for (victim, *_), count in rounds.kills.items() if victim == "engine")
    assert report.dropped <= 2 * killed_engines, report
    losses = box.losses(job_id)
    assert sorted(losses) == list(range(1, max(losses) + 1)), "no step of the job is missing"
    box.run("job", "cancel", job_id)
