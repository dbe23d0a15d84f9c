"""Threads of a forked process that compute at once, as those do that load a version in place."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, threading
import torch
from serve.load.converting import Converting
from serve.load.kernel_threads import renew_pool

torch.set_num_threads(8)    # an engine sets its number, and computes or asks for it, before it forks its core
torch.get_num_threads()
renewed, forks, threads = sys.argv[1] == "renewed", int(sys.argv[2]), 8


def compute(start):
    start.wait()
    torch.ones(2**17)       # large enough to be shared among threads
    return torch.get_num_threads()


def plain_threads():
    start = threading.Barrier(threads)
    several = [threading.Thread(target=tried, args=(start,)) for _ in range(threads)]
    [thread.start() for thread in several]
    [thread.join() for thread in several]


def tried(start):
    try:
        compute(start)
    except RuntimeError as error:
        assert "Invalid thread pool" in str(error)
        failed.append(error)


failed = []
bad = 0
for _ in range(forks):
    child = os.fork()
    if child == 0:
        if renewed:
            renew_pool()
            torch.set_num_threads = lambda count: None      # as vLLM's worker does
            start, taken = threading.Barrier(threads), []
            with Converting(range(threads), lambda _: taken.append(compute(start)), threads) as converting:
                converting.wait_for_all()
            assert sorted(taken) == [1] * 7 + [8], taken
            assert torch.get_num_threads() == 8
        plain_threads()
        os._exit(len(failed))
    bad += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
print(bad)
"""


def forks_that_failed(renewed: bool, forks: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "renewed" if renewed else "inherited", str(forks)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def test_threads_of_a_fork_compute_at_once_when_its_pool_was_renewed():
    assert forks_that_failed(renewed=True, forks=20) == 0
