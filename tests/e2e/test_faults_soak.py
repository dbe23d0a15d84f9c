"""Everything that a machine does to a box in its years, in an hour: two hundred faults under load, and no hand helps.

Each round makes one fault while clients ask and a job trains, and waits until the box is whole again by itself:
requests are answered, streaming and not, no hand-over is under way, the job does steps. Then it counts what the clients
saw, the steps that were done anew, and what the box holds more than before. `FAULTS`, `FAULT_SEED` and `FAULT_KINDS`
(names, commas between) in the environment choose how many, which and of which kinds; `FAULT_LEAVE_GB` what a memory hog
leaves; one fault in `FAULT_LONG_EVERY` of each kind that lasts does so for half a minute. `FAULT_TABLE` names a file
that gets the table after each fault.

A box that is not whole after three minutes needed a hand: that is counted, the box is started anew, and the run goes on
to tell of the other faults; it fails at its end.

The full disk and the full shared memory need root, for mounts of the test's own, the moved clock a C compiler: kinds
that cannot be made are said and left out. `FAULTS=20 pytest -s -m soak tests/e2e/test_faults_soak.py`
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e import faults_support as faults
from tests.e2e.box_support import WholeBox, gsm8k, wait_for
from tests.e2e.faults_support import GB, Clients, FaultyBox, Impossible

FAULTS = int(os.environ.get("FAULTS", "200"))
SEED = int(os.environ.get("FAULT_SEED", time.time()))
ONLY = [name for name in os.environ.get("FAULT_KINDS", "").split(",") if name]
LEAVE_BYTES = int(float(os.environ.get("FAULT_LEAVE_GB", 0)) * GB) or psutil.virtual_memory().total // 20
DEVICES, TRAINING = 3, 2
SHORT_S, LONG_S = 4.0, 30.0
LONG_EVERY = int(os.environ.get("FAULT_LONG_EVERY", "8"))
TABLE = os.environ.get("FAULT_TABLE", "")
WHOLE_S = 180.0
HELD_S, SLOW_S = 3.0, 60.0
LOST_S = 60.0  # of work: half a minute, and what a busy machine adds
DATA_BYTES, SHM_BYTES = 2 * GB, 3 * GB  # memory of this machine while they are full
SETTINGS = f"[box]\ndevices = {DEVICES}\n[scheduler]\ndevice_deaths = 0\n"  # here it is not the devices that kill

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


@dataclass
class Seen:
    """Of all faults of one kind."""

    times: int = 0
    hands: int = 0
    ok: int = 0
    held: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    silent: int = 0
    doubled: int = 0
    whole_s: list[float] = field(default_factory=list)
    anew: int = 0
    long_lost: int = 0
    grown: Counter[str] = field(default_factory=Counter)


class NotWholeError(AssertionError):
    """The box did not come back by itself; the message says what was missing."""


class FaultRun:
    """The box under faults, and what was seen."""

    def __init__(self, box: FaultyBox, job_id: str, clients: Clients, mounts: str):
        self.box, self.job_id, self.clients = box, job_id, clients
        self.at_first: dict[str, float] = {}
        self.random = random.Random(SEED)
        self.seen: dict[str, Seen] = {}
        self.impossible: dict[str, str] = {}
        self.torn = 0
        self.kinds = {name: make for name, make in self._kinds(mounts).items() if not ONLY or name in ONLY}

    def _kinds(self, mounts: str) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        box, choice = self.box, self.random

        def of(make: Callable[..., AbstractContextManager[None]], *given: object):
            return lambda: make(*given)

        def mounted(make: Callable[..., AbstractContextManager[None]], *given: object):
            def made() -> AbstractContextManager[None]:
                if mounts:
                    raise Impossible(mounts)
                return make(*given)

            return made

        names = ("controller", "gateway", "engine", "rank", "raylet")
        return {
            **{
                f"kill {name}": of(faults.killed, box, name, choice)
                for name in (*names, "main", "ray's head", "ray's agent", "supervisor", "warm parent")
            },
            **{f"stop {name}": of(faults.stopped, box, name, choice) for name in names},
            **{
                f"no descriptors {name}": of(faults.without_descriptors, box, name, choice)
                for name in ("controller", "gateway")
            },
            "full disk": mounted(faults.full, box.data_dir),
            "full shared memory": mounted(faults.full, Path("/dev/shm")),
            "memory hog": of(faults.hogged, LEAVE_BYTES),
            "power loss": self._power_loss,
        }

    # --- one fault

    def play(self, number: int, kind: str) -> None:
        seen = self.seen.setdefault(kind, Seen())
        before, outcomes, anew = faults.holdings(self.box), len(self.clients.outcomes), self.steps_anew()
        lasts_s = (
            0.0
            if kind.startswith("kill") or kind == "power loss"
            else (LONG_S if seen.times % LONG_EVERY == LONG_EVERY - 1 else SHORT_S)
        )
        self.at_first = self.at_first or before
        print(f"{number:3d} {datetime.now():%H:%M:%S} {kind}", flush=True)
        victims = self.victims(kind)
        began_s = time.monotonic()
        try:
            with self.kinds[kind]():
                time.sleep(lasts_s)
        except Impossible as why:
            self.impossible[kind] = str(why)
            return
        if kind == "kill main":  # as systemd does
            wait_for(lambda: not self.box.running(), "everything to end with the main process", 30)
            self.box.up()
        seen.times += 1
        try:
            self.wait_successor(kind, victims)
            waited = self.wait_whole(began_s)
        except NotWholeError as why:
            seen.hands += 1
            print(f"    {kind}: NOT WHOLE: {why}", flush=True)
            self.tell_logs(began_s)
            self.help()
            self.count(seen, outcomes)
            return
        seen.whole_s.append(time.monotonic() - began_s)
        self.count(seen, outcomes)
        lost = self.steps_anew() - anew
        seen.anew += lost
        seen.long_lost += lost * self.step_s() > LOST_S
        after = faults.holdings(self.box)
        seen.grown.update({name: after[name] - before[name] for name in after})
        print(
            f"    {kind:24s} whole after {seen.whole_s[-1]:5.1f} s ({lasts_s:.0f} of them the fault), "
            f"{lost} steps anew",
            flush=True,
        )
        if seen.whole_s[-1] > SLOW_S:
            print("\n".join(f"      {seconds:5.1f} s {why}" for why, seconds in waited.items()), flush=True)
            self.tell_logs(began_s)

    def victims(self, kind: str) -> set[int]:
        """The processes whose work another one must do before the box can be whole: of the name that is killed."""
        name = kind.removeprefix("kill ") if kind.startswith("kill ") else ""
        return set(self.box.pids_of(name)) if name else set()

    def wait_successor(self, kind: str, victims: set[int]) -> None:
        """Until another process does the work of the one that ended: before that the box may look as if nothing
        had happened. Raises NotWholeError."""
        until_s = time.monotonic() + WHOLE_S
        while victims and not self.victims(kind) - victims:
            if time.monotonic() > until_s:
                raise NotWholeError(f"nobody took the place of what ended with {kind}")
            time.sleep(0.25)

    def wait_whole(self, began_s: float) -> Counter[str]:
        """Seconds that were waited for each thing that was missing. Raises NotWholeError."""
        reached, ended_s = self.reached(), time.monotonic()
        waited: Counter[str] = Counter()
        looked_s = time.monotonic()
        while why := self.not_whole(reached, ended_s):
            if time.monotonic() - ended_s > WHOLE_S or why.startswith("the job has"):
                raise NotWholeError(why)
            time.sleep(0.25)
            if not waited[why.partition(",")[0]]:
                print(f"    {time.monotonic() - began_s:6.1f} {why[:200]}", flush=True)
            waited[why.partition(",")[0]] += time.monotonic() - looked_s
            looked_s = time.monotonic()
        return waited

    def help(self) -> None:
        """The hand that the box needed: it is started anew, and a job that has ended is submitted once more."""
        print(json.dumps(self.box.tried("status"), indent=1)[:6000], flush=True)
        self.box.run("down", "--force")
        self.box.up()
        if self.why_ended():
            self.job_id = submitted(self.box)
        self.wait_whole(time.monotonic())

    def why_ended(self) -> str:
        phase = self.query("SELECT phase FROM jobs WHERE id = ?", self.job_id)[0][0]
        return f"the job has {phase}" if phase in ("failed", "cancelled", "succeeded") else ""

    def tell_logs(self, since_s: float) -> None:
        """What the controller thought worth a warning since then, and what the job was told to have done."""
        since = time.time() - (time.monotonic() - since_s)
        for when, message in self.query(
            "SELECT created_s, message FROM job_events WHERE job_id = ? AND type = 'message' AND created_s >= ?",
            self.job_id,
            since,
        ):
            print(f"      {when - since:6.1f} job: {message[:200]}", flush=True)
        for line in (self.box.data_dir / "logs" / "controller.log").read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError):
                told = json.loads(line)
                when = datetime.fromisoformat(told["time"]).timestamp()
                if when >= since and told["level"] in ("warning", "error"):
                    print(f"      {when - since:6.1f} {told['event'][:160]}", flush=True)

    def count(self, seen: Seen, since: int) -> None:
        for outcome in self.clients.outcomes[since:]:
            if outcome.error is not None:
                seen.errors[faults.told_as(outcome.error)] += 1
            else:
                seen.ok += 1
                seen.held += outcome.seconds > HELD_S
                seen.silent += outcome.finish_reason is None
                seen.doubled += outcome.answers > 1

    def not_whole(self, reached: int, since_s: float) -> str:
        """What is missing, "" if nothing."""
        try:
            now = self.box.tried("status")
        except httpx.TransportError as error:
            return f"the endpoint does not answer ({error!r})"
        if now is None:
            return "the controller does not answer"
        if self.query("SELECT count(*) FROM handovers WHERE ended_s IS NULL")[0][0]:
            return "a hand-over is under way"
        if ended := self.why_ended():
            return ended
        phase = self.query("SELECT phase FROM jobs WHERE id = ?", self.job_id)[0][0]
        if (step := self.reached()) <= reached:
            return f"the job is {phase}, at step {step}"
        answered = [o for o in self.clients.outcomes if o.started_s > since_s and o.error is None]
        if not {True, False} <= {o.streamed for o in answered}:
            return f"no request was answered since, {[o.error for o in self.clients.outcomes[-3:]]}"
        return ""

    def query(self, sql: str, *given: object) -> list[tuple]:
        with suppress(sqlite3.OperationalError):
            return self._read(sql, *given)
        time.sleep(0.5)  # the controller was opening it
        return self._read(sql, *given)

    def _read(self, sql: str, *given: object) -> list[tuple]:
        journal = sqlite3.connect(f"file:{self.box.data_dir}/appliance.db?mode=ro", uri=True, timeout=10)
        try:
            return journal.execute(sql, given).fetchall()
        finally:
            journal.close()

    def reached(self) -> int:
        return self.query("SELECT coalesce(max(step), 0) FROM job_metrics WHERE job_id = ?", self.job_id)[0][0]

    def step_s(self) -> float:
        """As the last steps took."""
        rows = self.query("SELECT created_s FROM job_metrics WHERE job_id = ? ORDER BY step DESC LIMIT 9", self.job_id)
        times = [row[0] for row in rows]
        return statistics.median([late - early for late, early in zip(times, times[1:], strict=False)] or [0.0])

    def steps_anew(self) -> int:
        rows = self.query("SELECT data FROM job_events WHERE job_id = ? AND data LIKE '%steps_anew%'", self.job_id)
        return sum(json.loads(row[0])["steps_anew"] for row in rows)

    # --- the power goes

    def _power_loss(self) -> AbstractContextManager[None]:
        """Nothing happens to the box: a copy of what it had on disk at this moment is started beside it."""
        self.torn += 1
        folder = self.box.data_dir.parent / f"torn-{self.torn}"
        known = {model.id for model in self.box.client(max_retries=5).models.list()}
        faults.torn_copy(self.box, folder, self.random)
        copy = WholeBox(folder)
        try:
            copy.run("up", "--detach", "--port", str(copy.port), "--devices", "1")
            copy.key = self.box.key
            assert {model.id for model in copy.client().models.list()} == known, "a model is gone"
            phase = copy.job(self.job_id)["phase"]
            assert phase in ("running", "suspended", "queued"), f"the job has {phase} in the copy"
            steps = sorted(copy.losses(self.job_id))
            assert steps == list(range(1, len(steps) + 1)), "a step that was told is gone"
            copy.run("down")
            assert copy.left() == []
        finally:
            copy.destroy()
            shutil.rmtree(folder, ignore_errors=True)
        return nullcontext()

    # --- the end

    def table(self) -> str:
        lines = []
        for kind, seen in self.seen.items():
            if not seen.times:
                continue
            errors = ", ".join(f"{name} {count}" for name, count in seen.errors.most_common()) or "none"
            grown = ", ".join(f"{total / seen.times:+.1f} {name}" for name, total in seen.grown.items())
            whole_s = seen.whole_s or [float("inf")]
            lines.append(
                f"{kind:24s} x{seen.times:<3d} hands {seen.hands}; whole in {statistics.median(whole_s):5.1f} s, "
                f"at most {max(whole_s):5.1f}; ok {seen.ok}, held {seen.held}, errors: {errors}; "
                f"silent {seen.silent}, doubled {seen.doubled}; steps anew {seen.anew}; each {grown}"
            )
        every = self.seen.values()
        now = faults.holdings(self.box)
        grown = ", ".join(f"{now[name] - first:+.1f} {name}" for name, first in self.at_first.items())
        lines.append(
            f"{'all':24s} x{sum(seen.times for seen in every):<3d} hands {sum(seen.hands for seen in every)}; "
            f"ok {sum(seen.ok for seen in every)}, errors {sum(seen.errors.total() for seen in every)}; "
            f"silent {sum(seen.silent for seen in every)}, doubled {sum(seen.doubled for seen in every)}; "
            f"steps anew {sum(seen.anew for seen in every)}; since the first fault {grown}"
        )
        lines += [f"{kind:24s} not made: {why}" for kind, why in self.impossible.items()]
        return "\n".join(lines)


@pytest.fixture(scope="module")
def mounts(tmp_path_factory):
    """The data directory, and why no mounts of its own could be made, if so."""
    folder = tmp_path_factory.mktemp("faults") / "box"
    folder.mkdir(mode=0o700)
    undo = faults.own_mounts(folder, DATA_BYTES, SHM_BYTES)
    yield folder, undo if isinstance(undo, str) else ""
    if not isinstance(undo, str):
        undo()


@pytest.fixture(scope="module")
def box(mounts, tmp_path_factory):
    folder, _ = mounts
    one = FaultyBox(folder)
    (folder / "appliance.toml").write_text(SETTINGS)
    try:
        one.run("up", "--detach", "--port", str(one.port))
        scopes = [word for scope in ("admin", "inference", "fine_tuning") for word in ("--scope", scope)]
        one.key = one.ask("key", "create", "--name", "faults", *scopes)["key"]
        yield one
        one.run("down")
        assert one.left() == []
    finally:
        one.destroy()


def submitted(box: FaultyBox) -> str:
    """Id of a job that lasts longer than the run."""
    return box.submit("starter", box.upload(gsm8k("train", 2000)), "--epochs 50 --batch-size 4 --set max_length=256")


def test_faults_under_load(box, mounts, capsys):
    box.make_starter()
    job_id = submitted(box)
    box.run("mode", "set", "split", "--train", str(TRAINING), "--wait")
    with capsys.disabled(), Clients(box.url, box.key, "starter", workers=3, max_tokens=24) as clients:
        run = FaultRun(box, job_id, clients, mounts[1])
        print(f"\nseed {SEED}, {FAULTS} faults of {len(run.kinds)} kinds", flush=True)
        try:
            began_s = time.monotonic()
            wait_for(lambda: not run.not_whole(0, began_s), "the box to be whole before anything happens", WHOLE_S)
            played = 0
            while played < FAULTS and len(run.impossible) < len(run.kinds):
                for kind in run.random.sample(sorted(run.kinds), len(run.kinds)):
                    if played < FAULTS and kind not in run.impossible:
                        run.play(played + 1, kind)
                        played += kind not in run.impossible
                        if TABLE:
                            Path(TABLE).write_text(run.table() + "\n")
        except BaseException:
            run.tell_logs(time.monotonic() - WHOLE_S)
            with suppress(Exception):  # noqa: BLE001 - what is to be told is why the run ended
                print(json.dumps(box.tried("status"), indent=1)[:6000], flush=True)
            box.destroy()  # else the clients would wait for what nobody starts
            raise
        finally:
            print(run.table(), flush=True)
    assert played == FAULTS or run.impossible
    assert sum(seen.silent + seen.doubled for seen in run.seen.values()) == 0
    assert sum(seen.hands for seen in run.seen.values()) == 0, "the box needed a hand"
    assert sum(seen.long_lost for seen in run.seen.values()) == 0, "a fault lost more steps than a minute of work"
    steps = sorted(box.losses(run.job_id))
    assert steps == list(range(1, len(steps) + 1)), "no step of the job is missing"
    box.run("job", "cancel", run.job_id)
