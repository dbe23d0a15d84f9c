"""Processes: their end, death with the parent, memory use, processors, and the order of OOM kills."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PR_SET_PDEATHSIG = 1
NUMA_NODES = Path("/sys/devices/system/node")


def last_error(words: str) -> OSError:
    """Return the error of the libc call that has just failed, prefixed with `words`."""
    number = ctypes.get_errno()
    return OSError(number, f"{words}: {os.strerror(number)}")


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that created it ends (prctl(2)).

    Forks and execs of set-uid programs drop the request, so every process must call this. The kernel does not report
    a parent that died before the call, hence the check of the parent's pid (`parent`, if noted before the fork).
    """
    parent = os.getppid() if parent is None else parent
    if libc.prctl(_PR_SET_PDEATHSIG, by) != 0:
        raise last_error("prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


def life() -> dict[str, int | str]:
    """Return this process's pid, and the kernel and pid namespace in which it is valid, so that another process can
    tell whether it can watch this one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": os.getpid(), "kernel": f"{boot} {os.readlink('/proc/self/ns/pid')}"}


def kill_group(pgid: int) -> None:
    """SIGKILL every process of a group; does nothing if the group is already gone."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        return


def group_rss_bytes(pgid: int) -> int:
    """Proportional set size of all processes of a group, in bytes: each shared page is divided among its users."""
    nbytes = 0
    for pid in group_pids(pgid):
        with suppress(psutil.Error):  # the process is gone
            nbytes += psutil.Process(pid).memory_full_info().pss
    return nbytes


def group_pids(pgid: int) -> list[int]:
    """Pids of the living processes of a group. A process lives as long as any of its threads: the kernel shows a zombie
    once the first thread has ended, but releases memory, files and GPUs only with the last thread."""
    pids = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == pgid:
                process = psutil.Process(pid)
                # The thread count of a zombie includes its first thread (proc_pid_stat(5)).
                if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                    pids.append(pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return sorted(pids)


def group_alive(pgid: int) -> bool:
    """Whether the group has a living process. It tries a kernel call first: walking /proc is slow."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return bool(group_pids(pgid))


def how_it_ended(status: int) -> str:
    """Completes "the process …". status: as in subprocess, negative for a signal."""
    if status == -signal.SIGKILL:  # the box itself does not kill it
        return (
            "was killed (SIGKILL), most likely by the kernel for lack of memory: `appliance doctor` shows its users; "
            "try again"
        )
    if status == -signal.SIGILL:
        return "was ended by SIGILL, by an instruction that this machine refuses: `appliance doctor` shows its features"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


async def run_command(*command: str, within_s: float | None = None) -> tuple[int, bytes, bytes]:
    """Run a command, and return its exit status, output and errors. Kills the command at the time limit or on
    cancellation. Raises TimeoutError."""
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return int(process.returncode or 0), output, errors


def settle_garbage() -> None:
    """Freeze all objects for the garbage collector; call it once in a server process after start-up. Each full
    collection would walk them while every request waits: 0.13 s for a controller's 220,000 objects, and a body of some
    thousand lists triggers one. Requests leave few cycles, so collections may be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class DiesAs(IntEnum):
    """`oom_score_adj` of each kind of process, so that the kernel, when memory runs out, first kills the process whose
    death costs least. A score is the share of all memory in thousandths plus this number; the small steps only order
    the box's own processes. The main process keeps the value from its unit or shell.
    """

    TRIAL = 400
    RANK = 300
    ASLEEP = 250
    ENGINE = 150
    SUPERVISOR = 100
    GATEWAY = 60
    CONTROLLER = 30


def dies_as(kind: DiesAs, pid: int | str = "self") -> bool:
    """Set the `oom_score_adj` of a process. False if the process is gone or the kernel refuses: an unprivileged process
    may not go below a value that a privileged process set."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(int(kind)))
    except OSError as error:
        log.info("cannot set oom_score_adj of process %s to that of %s: %s", pid, kind.name.lower(), error.strerror)
        return False
    return True


def group_dies_as(kind: DiesAs, pgid: int) -> None:
    """`dies_as` for every process of a group; processes that they fork later inherit it."""
    for pid in group_pids(pgid):
        dies_as(kind, pid)


def kills_so_far() -> int:
    """Number of processes, of any user, OOM-killed since boot; 0 if the kernel does not report it."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a process that reads an untrusted file."""

    cpu_s: int
    memory_bytes: int

    def hold(self) -> None:
        """Apply these limits to this process. If the host's memory runs out, it dies before engines and ranks."""
        die_with_parent()
        dies_as(DiesAs.TRIAL)
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s + 1))  # SIGXCPU: never from memory
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))  # not AS: arrays are mapped
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bind_near(numa_nodes: Sequence[int | None]) -> frozenset[int] | None:
    """Bind this process, and every thread and process that it starts from now on, to the processors of these nodes.
    Returns the processors, or None if nothing was bound. Call it before starting threads.

    Memory follows: Linux takes a page from the node of the thread that touches it first (numa(7)). It binds nothing if
    a device's node is unknown (None), or if the process may use none of the nodes' processors (a container's cpuset).
    """
    lists = [NUMA_NODES / f"node{node}" / "cpulist" for node in numa_nodes]
    if not all(file.exists() for file in lists):
        return None
    allowed, near = os.sched_getaffinity(0), set()
    for part in ",".join(file.read_text().strip() for file in lists).split(","):  # such as 0-3,8; "" without processors
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1)) if part else set()
    near &= allowed
    if not near or near == allowed:
        return None
    os.sched_setaffinity(0, near)
    return frozenset(near)
