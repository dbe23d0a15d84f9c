"""Machine faults under load: clients send requests, a job trains, and the box recovers from each fault by itself. Half
of the kills and stops begin during a hand-over.

`FAULTS=20 FAULT_SEED=7 FAULT_KINDS="kill rank,full disk" pytest -s -m soak tests/e2e/test_chaos_soak.py`. The full disk
and the full shared memory need root, because the test mounts its own.
"""

import ctypes
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from appliance.demo import Load
from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box

FAULTS = int(os.environ.get("FAULTS", "60"))
SEED = int(os.environ.get("FAULT_SEED", time.time()))
ONLY = [name for name in os.environ.get("FAULT_KINDS", "").split(",") if name]
GB = 1 << 30
DATA_BYTES, SHM_BYTES = 2 * GB, 3 * GB
LASTS_S, RECOVERY_S = 4.0, 400.0
TRAINING_DEVICES = (1, 2)  # of three devices: each change is a hand-over, and one engine always stays
KILLED = ("main", "controller", "gateway", "engine", "rank", "warm parent", "raylet", "ray's head", "supervisor")
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 0x40000, 2
HOG = """
import sys, time, psutil
kept = []
while (spare := psutil.virtual_memory().available - int(sys.argv[1])) > 0:
    kept.append(bytearray(b"x") * min(spare, 1 << 28))
print("full", flush=True)
time.sleep(3600)
"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


class Chaos:
    """A box, its training job, and a count of the injected faults."""

    def __init__(self, box: WholeBox, job_id: str, load: Load):
        self.box, self.job_id, self.load = box, job_id, load
        self.random = random.Random(SEED)
        self.training = TRAINING_DEVICES[-1]
        self.played: Counter[str] = Counter()

    def faults(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Faults by name; each lasts until its context exits."""
        stopped, starved = ("controller", "gateway", "engine", "rank", "raylet"), ("controller", "gateway")
        every = {
            **{f"kill {name}": partial(self.killed, name) for name in KILLED},
            **{f"stop {name}": partial(self.stopped, name) for name in stopped},
            "hang engine": self.hung,
            **{f"no descriptors {name}": partial(self.without_descriptors, name) for name in starved},
            "full disk": partial(full, self.box.data_dir),
            "full shared memory": partial(full, Path("/dev/shm")),
            "memory hog": hogged,
            "power loss": self.power_loss,
        }
        return {name: make for name, make in every.items() if not ONLY or name in ONLY}

    def play(self, name: str, fault: Callable[[], AbstractContextManager[None]]) -> None:
        began_s = time.monotonic()
        if name.startswith(("kill", "stop")) and self.random.random() < 0.5:
            self.begin_handover()
        with fault():
            if not name.startswith(("kill", "power")):
                time.sleep(LASTS_S)
        if name == "kill main":  # like systemd
            wait_for(lambda: not self.box.running(), "every process to end with the main process", 30)
            self.box.up()
        step, answered = self.step(), self.load.finished
        missing = ""

        def recovered() -> bool:
            nonlocal missing
            missing = self.missing(step, answered)
            return not missing

        try:
            wait_for(recovered, f"the box to recover from {name}", RECOVERY_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {missing}") from error
        self.played[name] += 1
        print(f"{self.played.total():3d} {name:24s} recovered after {time.monotonic() - began_s:5.1f} s", flush=True)

    def begin_handover(self) -> None:
        """Move a device between training and serving; return at a random moment of it."""
        self.training = next(count for count in TRAINING_DEVICES if count != self.training)
        self.box.run("mode", "set", "split", "--train", str(self.training), "--no-wait")
        time.sleep(self.random.uniform(0, 6))

    def missing(self, step: int, answered: int) -> str:
        """A sentence on what has not recovered since a fault; empty once the box has recovered."""
        try:
            status = self.box.tried("status")
        except httpx.TransportError as error:
            return f"the gateway does not answer: {error!r}"
        if status is None:
            return "the controller does not answer"
        used = [
            device for one in status["replicas"] if one["state"] not in ("asleep", "dead") for device in one["devices"]
        ]
        assert len(used) == len(set(used)), f"a device has two engines: {status['replicas']}"
        if self.query("SELECT count(*) FROM handovers WHERE ended_s IS NULL"):
            return "a hand-over is in progress"
        if (now := self.step()) <= step:
            return f"the job is at step {now} and was at {step}"
        good = any(outcome.error is None for outcome in self.load.outcomes[answered:])
        return "" if good else "no request was answered since the fault"

    def step(self) -> int:
        return int(self.query("SELECT coalesce(max(step), 0) FROM job_metrics WHERE job_id = ?", self.job_id))

    def query(self, sql: str, *values: object) -> float:
        for _ in range(20):
            with suppress(sqlite3.OperationalError):  # a restarted controller may be opening the database
                path = f"file:{self.box.data_dir}/appliance.db?mode=ro"
                with closing(sqlite3.connect(path, uri=True, timeout=10)) as database:
                    return database.execute(sql, values).fetchone()[0]
            time.sleep(0.5)
        raise AssertionError("the database cannot be read")

    def pid_of(self, name: str) -> int:
        return self.random.choice(sorted(wait_for(lambda: self.box.pids_of(name), f"a {name}", 60)))

    @contextmanager
    def killed(self, name: str) -> Iterator[None]:
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        yield
        wait_for(lambda: not psutil.pid_exists(pid), f"the end of {name}", 30)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        process = psutil.Process(self.pid_of(name))
        process.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop an engine without resuming it: the box must end and replace it."""
        process = psutil.Process(self.pid_of("engine"))
        process.suspend()
        yield
        wait_for(lambda: not process.is_running(), "the engine that hung to be ended", RECOVERY_S)

    @contextmanager
    def without_descriptors(self, name: str) -> Iterator[None]:
        pid = self.pid_of(name)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds(), hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    @contextmanager
    def power_loss(self) -> Iterator[None]:
        """Start a box on a copy of the disk as after a power loss: new files are cut, a transaction is half done."""
        copy = WholeBox(self.box.data_dir.parent / "torn")
        models = {model.id for model in self.box.client(max_retries=5).models.list()}
        self.copy_torn(copy.data_dir)
        try:
            copy.run("up", "--detach", "--port", str(copy.port), "--devices", "1")
            copy.key = self.box.key
            assert {model.id for model in copy.client().models.list()} == models
            assert copy.job(self.job_id)["phase"] in ("running", "suspended", "queued")
            steps = sorted(copy.losses(self.job_id))
            assert steps == list(range(1, len(steps) + 1)), "a reported step is gone"
            copy.run("down")
            assert copy.left() == []
        finally:
            copy.destroy()
            shutil.rmtree(copy.data_dir, ignore_errors=True)
        yield

    def copy_torn(self, target: Path) -> None:
        frozen = [self.box.main_pid(), *self.box.running()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in frozen:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                ignored = shutil.ignore_patterns("filler*", "*.sock")
                shutil.copytree(self.box.data_dir, target, symlinks=True, ignore=ignored)
        synced = ("box.json", "appliance.toml", "ray.token")
        for path in target.rglob("*"):
            if path.is_file() and not path.is_symlink() and not path.name.startswith(("appliance.db", *synced)):
                status = path.stat()
                if time.time() - status.st_mtime < 2.0 + LASTS_S and status.st_size:
                    os.truncate(path, self.random.randrange(status.st_size))
        if (wal := target / "appliance.db-wal").exists():
            with wal.open("ab") as file:
                file.write(self.random.randbytes(self.random.randrange(1, 4096)))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the volume of this folder completely."""
    fillers = [folder / f"filler.{number}" for number in range(3)]
    try:
        for filler in fillers:  # several times, because other processes free bytes meanwhile
            with filler.open("wb", buffering=0) as file:
                for piece in (1 << 26, 1 << 20, 1 << 12):
                    with suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece)
        yield
    finally:
        for filler in fillers:
            filler.unlink(missing_ok=True)


@contextmanager
def hogged() -> Iterator[None]:
    """Let another program take 95 % of the host's memory."""
    leave = str(psutil.virtual_memory().total // 20)
    with subprocess.Popen([sys.executable, "-c", HOG, leave], stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None
        hog.stdout.readline()
        yield
        hog.kill()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Iterator[Path]:
    """A folder on a small disk, and a small shared memory for all processes that this thread starts from now on."""
    folder = tmp_path_factory.mktemp("chaos") / "box"
    folder.mkdir(mode=0o700)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        pytest.skip("own mounts were refused; run as root")
    targets = ((folder, DATA_BYTES, "0700"), (Path("/dev/shm"), SHM_BYTES, "1777"))
    for target, size, mode in targets:
        assert not libc.mount(b"tmpfs", bytes(target), b"tmpfs", 0, f"size={size},mode={mode}".encode())
    yield folder
    for target, *_ in reversed(targets):
        libc.umount2(bytes(target), _MNT_DETACH)


def test_box_recovers_from_each_fault(data_dir, capsys):
    with whole_box(data_dir, "[box]\ndevices = 3\n") as box:
        box.make_starter()
        options = "--epochs 50 --batch-size 4 --set max_length=256"
        job_id = box.submit("starter", box.upload(gsm8k("train", 2000)), options)
        box.run("mode", "set", "split", "--train", str(TRAINING_DEVICES[-1]), "--wait")
        with capsys.disabled(), Load(box.url, box.key, "starter", workers=3, max_tokens=24) as load:
            chaos = Chaos(box, job_id, load)
            faults = chaos.faults()
            print(f"\nseed {SEED}, {FAULTS} faults of {len(faults)} kinds", flush=True)
            try:
                wait_for(chaos.step, "the first step of the job", RECOVERY_S)
                while chaos.played.total() < FAULTS:
                    for name in chaos.random.sample(sorted(faults), min(len(faults), FAULTS - chaos.played.total())):
                        chaos.play(name, faults[name])
            except BaseException:
                box.destroy()  # otherwise the load waits for an engine that is never started
                raise
        report = load.report()
        print(f"{report.requests} requests, {report.dropped} ended with an error: {report.errors}", flush=True)
        assert (report.truncated, report.duplicated) == (0, 0)
        losses = box.losses(job_id)
        assert sorted(losses) == list(range(1, max(losses) + 1)), "no step of the job is missing"
        box.run("job", "cancel", job_id)
