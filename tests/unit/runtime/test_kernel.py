"""A process group counts as dead only after the kernel has released its resources."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from runtime.logs import tail
from runtime.processes.kernel import group_alive, group_pids

# A process whose main thread has ended, while another of its threads holds a lock as it would hold a GPU.
HEADLESS = """
import ctypes, fcntl, os, sys, threading
os.setsid()
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
print("locked", flush=True)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_held(path: Path) -> bool:
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_group_alive_until_last_thread_ends(tmp_path):
    lock = tmp_path / "device"
    command = [sys.executable, "-S", "-c", HEADLESS, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        while state(process.pid) != "Z":
            os.sched_yield()
        assert is_held(lock)
        assert group_alive(process.pid) and group_pids(process.pid) == [process.pid]
        process.stdin.close()
        while group_alive(process.pid):
            os.sched_yield()
        assert state(process.pid) == "Z", "not reaped yet, and no device waits for that"
        assert not is_held(lock) and group_pids(process.pid) == []


def test_tail_returns_whole_lines_after_offset(tmp_path):
    log = tmp_path / "l.log"
    log.write_text("of an earlier engine\n")
    begin = log.stat().st_size
    with open(log, "a") as file:
        file.write("first\n" + "x" * 30_000 + "\nlast\n")
    lines = tail(log, begin).splitlines()
    assert lines[-1] == "last" and all(len(line) <= 500 for line in lines)
    log.write_text("rotated\n")
    assert tail(log, begin) == "rotated"
