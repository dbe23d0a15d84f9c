"""Faults of a machine and what they do to a real box: how each is made, and the clients that see it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import psutil

from appliance.demo.load_generator import Load, Outcome
from tests.e2e.box_support import WholeBox, wait_for

GB = 1 << 30
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_MOST_PIECES = 1 << 12
_CODE = re.compile(r"'code': '(\w+)'")
HOG = """
import contextlib, os, sys, time, psutil
with contextlib.suppress(PermissionError):
    os.nice(-15)  # else it takes the memory as slowly as the box leaves it a processor
leave, kept = int(sys.argv[1]), []
while (spare := psutil.virtual_memory().available - leave) > 0:
    kept.append(bytearray(b"x") * min(spare, 1 << 28))
print("full", flush=True)
time.sleep(3600)
"""


class Impossible(Exception):
    """This fault cannot be made on this machine; the message says why."""


class Clients(Load):
    """A load that asks again a moment after it was refused a connection, instead of as fast as it can."""

    def _ask(self, outcome: Outcome) -> None:
        try:
            super()._ask(outcome)
        except openai.OpenAIError:
            time.sleep(0.3)
            raise


def told_as(error: str) -> str:
    """What a client would count this error as: OpenAI's code where the box gave one."""
    found = _CODE.search(error)
    return found[1] if found else error.partition(":")[0]


class FaultyBox(WholeBox):
    """A box that knows its processes by name."""

    def pids_of(self, name: str) -> list[int]:
        """Processes by the names that people know them by."""
        logs = {
            "controller": "controller.log",
            "gateway": "gateway.log",
            "engine": "engine-*.log",
            "rank": "*-rank*.log",
            "warm parent": "warm-*.log",
        }
        if name == "main":
            return [self.main_pid()]
        if name in logs:
            return self.pids_logging_to(logs[name])
        wanted = {"raylet": "/raylet", "ray's head": "/gcs_server", "supervisor": "ray::", "ray's agent": "ray::"}[name]
        programs = {pid: command.split(" ")[0] for pid, command in self.running().items()}
        found = {pid for pid, program in programs.items() if wanted in program}
        agents = {pid for pid in found if programs[pid].endswith("Agent")}
        found -= {pid for pid in found if programs[pid] == "ray::IDLE"}
        return sorted(agents if name == "ray's agent" else found - agents)


# --- the machine of the test's own


def own_mounts(data_dir: Path, data_bytes: int, shm_bytes: int) -> Callable[[], None] | str:
    """A disk and a shared memory of its own for what this thread starts from now on, small enough to be filled. Returns
    what undoes it, or why it could not be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return f"mounts of its own were refused ({os.strerror(ctypes.get_errno())}); run as root"
    for target, size, mode in ((data_dir, data_bytes, "0700"), (Path("/dev/shm"), shm_bytes, "1777")):
        if libc.mount(b"tmpfs", bytes(target), b"tmpfs", 0, f"size={size},mode={mode}".encode()):
            return f"a tmpfs at {target} was refused ({os.strerror(ctypes.get_errno())})"

    def undo() -> None:
        for target in (Path("/dev/shm"), data_dir):
            libc.umount2(bytes(target), 2)  # MNT_DETACH

    return undo


# --- faults; each lasts as long as its context


@contextmanager
def killed(box: FaultyBox, name: str, choice: random.Random) -> Iterator[None]:
    os.kill(_one_of(box, name, choice), signal.SIGKILL)
    yield


@contextmanager
def stopped(box: FaultyBox, name: str, choice: random.Random) -> Iterator[None]:
    pid = _one_of(box, name, choice)
    began_s = psutil.Process(pid).create_time()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(pid).create_time() == began_s:
                os.kill(pid, signal.SIGCONT)


@contextmanager
def without_descriptors(box: FaultyBox, name: str, choice: random.Random) -> Iterator[None]:
    """It may open nothing more than it has open."""
    pid = _one_of(box, name, choice)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds(), before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is left on the volume of this folder. Some come free as others delete; they go as well."""
    filler = folder / "filler"
    fillers = []
    try:
        for number in range(3):
            fillers.append(filler.with_suffix(f".{number}"))
            with open(fillers[-1], "wb", buffering=0) as file:
                # Large pieces first: what is asked for beyond what is there is not given in part.
                for piece in (1 << 26, 1 << 20, 1 << 12):
                    with suppress(OSError):
                        for _ in range(_MOST_PIECES):
                            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece)
        yield
    finally:
        for one in fillers:
            one.unlink(missing_ok=True)


@contextmanager
def hogged(leave_bytes: int) -> Iterator[None]:
    """Another program has all of the host's memory but so much."""
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(leave_bytes)], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None
        hog.stdout.readline()
        yield
    finally:
        hog.kill()
        hog.wait()
        hog.stdout.close()


def torn_copy(box: FaultyBox, target: Path, choice: random.Random) -> None:
    """The data directory as a power loss at this moment would leave it: what was written in the last seconds and never
    brought to the disk is cut short, and a transaction of the database that was not committed is half there."""
    frozen = [box.main_pid(), *box.running()]
    for pid in frozen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        shutil.copytree(box.data_dir, target, symlinks=True, ignore=shutil.ignore_patterns("filler*", "*.sock"))
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    now_s = time.time()
    for path in target.rglob("*"):
        if not path.is_file() or path.is_symlink() or path.name.startswith("appliance.db"):
            continue  # SQLite brings each commit to the disk before it says so
        status = path.stat()
        synced = path.name in ("box.json", "appliance.toml", "ray.token")
        if now_s - status.st_mtime < 2.0 and status.st_size and not synced:
            os.truncate(path, choice.randrange(status.st_size))
    wal = target / "appliance.db-wal"
    if wal.exists() and wal.stat().st_size:
        with open(wal, "ab") as file:
            file.write(choice.randbytes(choice.randrange(1, 4096)))


def _one_of(box: FaultyBox, name: str, choice: random.Random) -> int:
    wait_for(lambda: box.pids_of(name), f"a {name}", 60)
    return choice.choice(box.pids_of(name))


# --- what the box holds


def holdings(box: FaultyBox) -> dict[str, float]:
    """Memory and descriptors of the processes that live as long as the box, processes, and bytes on disk and in shared
    memory beside the weights."""
    memory = descriptors = 0
    for name in ("main", "controller", "gateway"):
        for pid in box.pids_of(name):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory += process.memory_full_info().uss
                descriptors += process.num_fds()
    disk = 0
    for path in box.data_dir.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                disk += path.stat().st_size
    return {"MB": memory / 1e6, "descriptors": descriptors, "disk MB": disk / 1e6, "processes": len(box.running())}
