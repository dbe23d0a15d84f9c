"""Wraps kernel calls and /proc reads about the lifetime and memory of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from runtime.libc import last_error, libc
from runtime.logs import readable

_TAIL_BYTES, _TAIL_CHARACTERS, _LINE_CHARACTERS = 16_384, 2000, 500  # one line may have a traceback or all settings
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that created it ends (prctl(2)).

    A fork or the exec of a set-uid program loses the request, so every process must make it. The kernel does not report
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
    """Proportional resident memory of all processes of a group, in bytes: each shared page divided by its sharers."""
    return sum(_measured(pid, lambda process: process.memory_full_info().pss) for pid in group_pids(pgid))


def group_resident_bytes(pgid: int) -> int:
    """Resident memory of all processes of a group in bytes, counting shared pages in each. It reads the kernel's
    counters; the proportional figure makes the kernel walk every page (0.1 s for a GB)."""
    return sum(_measured(pid, lambda process: process.memory_info().rss) for pid in group_pids(pgid))


def _measured(pid: int, measure: Callable[[psutil.Process], int]) -> int:
    try:
        return measure(psutil.Process(pid))
    except psutil.Error:  # it is gone
        return 0


def group_pids(pgid: int) -> list[int]:
    """Pids of the living processes of a group.

    A process lives as long as one of its threads does. The kernel shows a process as a zombie once its first thread
    has ended, but memory and open files, a GPU's among them, are given back when the last one ends. A killed process
    with a hundred threads (CUDA, NCCL, torch) is in that state for a while.
    """
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
    """Whether the group has a living process. It tries a kernel call first, because walking /proc is
    slow."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return bool(group_pids(pgid))


def tail(path: str | Path, begin: int = 0) -> str:
    """The last 2,000 characters of a log as plain text, empty if there is no log. begin: bytes that were in it before;
    a log that was rotated since is read from its beginning."""
    try:
        with open(path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            begin = begin if begin <= size else 0
            log.seek(max(begin, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    if size - _TAIL_BYTES > begin and "\n" in lines:  # half of a line is not JSON
        lines = lines.partition("\n")[2]
    return "\n".join(line[:_LINE_CHARACTERS] for line in readable(lines).splitlines())[-_TAIL_CHARACTERS:]
