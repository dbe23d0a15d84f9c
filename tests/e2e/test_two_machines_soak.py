"""A box and a second node on a separate network: kills, stops, cuts or removes parts of the second node, and reports
the effect on clients and the time to recover. Needs root; skipped if no network can be created.

`NODE_FAULTS="wire cut,kill raylet" pytest -s -m soak tests/e2e/test_two_machines_soak.py` chooses faults.
"""

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.demo import Load
from tests.e2e.box_support import WholeBox, gsm8k, wait_for
from tests.e2e.machines_support import OtherMachine, Wire, deploy_tiny, devices, invited, two_machines

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

JOB = "--epochs 50 --batch-size 4 --max-length 128 --lora-rank 4 --min-devices 2 --max-devices 2"
ALL = ["n0/0", "n1/0", "n1/1", "n1/2"]
STOPPED_S = 30.0
DISTINCT = tuple(f"{number} long stories" for number in range(500))  # equal prefixes go to one engine


@dataclass
class Machines:
    home: WholeBox
    away: OtherMachine
    wire: Wire

    @property
    def invitation(self) -> Path:
        return self.home.data_dir.parent / "n1.json"

    def join(self) -> None:
        self.away.join(invited(self.home, self.wire.away), devices=3)
        wait_for(lambda: devices(self.home) == ALL, "the other machine's devices", 400)

    def supervise(self) -> None:
        """Restart the node if it has ended, like systemd."""
        if self.away.process is not None and self.away.process.poll() is not None:
            self.away.join(self.invitation, devices=3)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as undo:
        try:
            wire = Wire()
            undo.callback(wire.remove)
        except OSError as error:
            pytest.skip(f"no machine of its own can be made here: {error}")
        yield Machines(*undo.enter_context(two_machines(tmp_path, wire.home, wire.away, wire)), wire)


def started(machines: Machines) -> str:
    """Start an engine on each machine, and a job on the other two devices of the second; return the job."""
    home = machines.home
    deploy_tiny(home)
    machines.join()
    home.run("mode", "set", "split", "--train", "2")
    home.run("model", "deploy", "tiny", "--min-replicas", "2")
    # Eight copies of the data, so that the job outlasts all faults on a fast machine.
    (home.data_dir / "train.jsonl").write_bytes(b"\n".join([gsm8k("train", 2000)] * 8))
    job = home.submit("tiny", home.data_dir / "train.jsonl", JOB)
    wait_for(lambda: whole(home, job), "engines on both machines and the job on the second", 600)
    wait_for(lambda: home.losses(job), "a step", 300)
    return job


def whole(home: WholeBox, job: str) -> bool:
    status = home.tried("status")
    if status is None or sorted(d["id"] for d in status["devices"] if d["health"] == "ok") != ALL:
        return False
    open_at = {d.partition("/")[0] for one in status["replicas"] if one["state"] == "open" for d in one["devices"]}
    ranks = [d["id"] for d in status["devices"] if d["holder"] and d["holder"]["id"] == job]
    return open_at == {"n0", "n1"} and len(ranks) == 2 and not status["degraded"]


def code_of(error: str) -> str:
    """The OpenAI code of an error, or its class."""
    found = re.search(r"'code': '(\w+)'", error)
    return found[1] if found else error.partition(":")[0]


def answered_by(home: WholeBox) -> Counter[str]:
    rows = [json.loads(line) for line in (home.data_dir / "logs" / "access.log").read_text().splitlines()]
    return Counter(row["replica"] for row in rows if row["path"].endswith("/chat/completions") and row["status"] == 200)


def served_there(home: WholeBox) -> Callable[[], bool]:
    """A function that tells whether engines of the second machine have answered since this call."""
    time.sleep(1)  # the gateway writes the access log every half second
    before = answered_by(home)

    def there() -> bool:
        of_n1 = [one["id"] for one in home.admin("status")["replicas"] if one["devices"][0].startswith("n1/")]
        return any((answered_by(home) - before)[one] >= 3 for one in of_n1)

    return there


# --- faults


@contextmanager
def killed(machines: Machines, name: str) -> Iterator[None]:
    os.kill(wait_for(lambda: machines.away.pids_of(name), f"a {name}", 60)[0], signal.SIGKILL)
    yield


@contextmanager
def stopped(machines: Machines, name: str) -> Iterator[None]:
    pid = wait_for(lambda: machines.away.pids_of(name), f"a {name}", 60)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


PARTS = ("raylet", "node's agent", "engine's supervisor", "rank's supervisor", "engine", "rank", "main")
FAULTS: dict[str, tuple[float, Callable[[Machines], Any]]] = {
    **{f"kill {part}": (0.0, lambda machines, part=part: killed(machines, part)) for part in PARTS},
    **{f"stop {part}": (STOPPED_S, lambda machines, part=part: stopped(machines, part)) for part in PARTS},
    "wire cut": (STOPPED_S, lambda machines: machines.wire.cut()),
    "wire cut for long": (90.0, lambda machines: machines.wire.cut()),
}


def test_box_recovers_from_faults_of_second_machine(machines: Machines) -> None:
    home = machines.home
    job = started(machines)
    chosen = [name for name in os.environ.get("NODE_FAULTS", "").split(",") if name] or list(FAULTS)
    rows, wrong = [], []
    with Load(home.url, home.key, "tiny", workers=4, max_tokens=200, prompts=DISTINCT) as load:
        wait_for(served_there(home), "answers of the second machine", 120)
        for name in chosen:
            lasts_s, fault = FAULTS[name]
            before, step = load.finished, max(home.losses(job))
            began_s = time.monotonic()
            with fault(machines):
                until_s = began_s + lasts_s
                while time.monotonic() < until_s:
                    machines.supervise()
                    time.sleep(0.5)
            over_s = time.monotonic()

            there: list[Callable[[], bool]] = []

            def again(job: str = job, step: int = step, there: list[Callable[[], bool]] = there) -> bool:
                """Whether box and second machine have recovered: after a cut, a lost node seems healthy."""
                machines.supervise()
                if not whole(home, job) or max(home.losses(job)) <= step:
                    there.clear()
                    return False
                if not there:
                    there.append(served_there(home))
                return there[0]()

            time.sleep(2.0)  # a death is not detected at once
            try:
                wait_for(again, f"all to be whole after {name}", 400)
            except AssertionError as error:
                wrong.append(f"{error}: {home.admin('status')}")
                break
            whole_s = time.monotonic() - over_s
            seen = load.outcomes[before:]
            errors = Counter(code_of(one.error) for one in seen if one.error)
            cut = sum(one.error is None and one.finish_reason is None for one in seen)
            longest = max(one.seconds for one in seen)
            rows.append(
                f"| {name} | {lasts_s:.0f} | {len(seen)} | {dict(errors)} | {cut} | {longest:.1f} | {whole_s:.0f} |"
            )
            print(rows[-1], flush=True)
            if cut or any(one.answers > 1 for one in seen):
                wrong.append(f"{name}: {cut} answers cut off without an error, or some duplicated")
            if longest > 60:
                wrong.append(f"{name}: a client waited {longest:.0f} s")
    print("| fault | s | requests | errors | cut | longest s | whole after s |", *rows, sep="\n", flush=True)
    assert not wrong, wrong
    steps = sorted(home.losses(job))
    assert steps == list(range(1, len(steps) + 1)), "a step is missing"
    home.run("job", "cancel", job)


# --- removal


def test_node_with_engine_and_job_is_removed(machines: Machines) -> None:
    home, away = machines.home, machines.away
    job = started(machines)
    with Load(home.url, home.key, "tiny", workers=4, max_tokens=200, prompts=DISTINCT) as load:
        wait_for(served_there(home), "answers of the second machine", 120)
        began_s = time.monotonic()
        home.run("node", "remove", "n1")
        wait_for(lambda: devices(home) == ["n0/0"], "its devices to be gone", 30)
        gone_s = time.monotonic() - began_s
        wait_for(lambda: away.process.poll() is not None, "the node to end", 60)
        ended_s = time.monotonic() - began_s
        before = load.finished
        wait_for(lambda: load.finished > before + 20, "answers of what is left", 120)
        seen = list(load.outcomes)
    errors = dict(Counter(code_of(one.error) for one in seen if one.error))
    print(
        f"removed: devices gone after {gone_s:.1f} s, the node ended after {ended_s:.1f} s; {len(seen)} requests, "
        f"errors {errors}, longest {max(one.seconds for one in seen):.1f} s",
        flush=True,
    )
    assert not [one for one in seen if one.error is None and one.finish_reason is None]
    assert away.process.returncode == 1 and away.left() == []
    row = wait_for(lambda: next((r for r in home.admin("queue")["data"] if r["id"] == job), None), "the job", 60)
    assert row["reason"], row
    print("the job waits:", row["reason"], flush=True)

    old = machines.invitation
    away.join(old, devices=3)
    wait_for(lambda: away.process.poll() is not None, "it to be ended again", 300)
    assert devices(home) == ["n0/0"] and away.left() == []

    # To lock out an owner of the old certificate who connects to Ray: create a new authority.
    home.run("down")
    shutil.rmtree(home.data_dir / "ca")
    (home.data_dir / "ray.token").unlink()
    home.up()
    away.join(old, devices=3)
    wait_for(lambda: away.process.poll() is not None, "the old invitation to be refused", 600)
    assert away.process.returncode == 1 and devices(home) == ["n0/0"]
    machines.join()
    home.run("job", "cancel", job)
