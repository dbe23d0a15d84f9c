"""Workers of one port: one that ends is replaced, one that hangs too, and no other is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Each worker says its number and pid, beats, and does nothing else.
SCRIPT = """
import json, os, signal, sys, time
from appliance.gateway.workers import Beats, Workers

def start(index):
    pid = os.fork()
    if pid:
        return pid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.write(1, json.dumps([index, os.getpid()]).encode() + b"\\n")
    while True:
        beats.beat(index)
        time.sleep(0.01)

beats = Beats(2)
sys.exit(Workers(start, 2, beats, hung_s=1.0, look_s=0.05).keep())
"""


class Kept:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pids: dict[int, int] = {}

    def begun(self) -> int:
        """The number of the next worker that begins."""
        assert self.process.stdout is not None
        index, pid = json.loads(self.process.stdout.readline())
        self.pids[index] = pid
        return index


@pytest.fixture
def kept() -> Iterator[Kept]:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        found = Kept(process)
        assert {found.begun(), found.begun()} == {0, 1}
        yield found
        process.terminate()
        assert process.wait(60) == 0


def test_one_that_hangs_is_killed_and_replaced(kept: Kept) -> None:
    """The box asks the port, and the other one answers: a stopped worker had its part of the clients for ever."""
    stopped, other = kept.pids[1], kept.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    assert kept.begun() == 1 and kept.pids[1] != stopped
    os.kill(kept.pids[1], signal.SIGSTOP)
    assert kept.begun() == 1, "and again"
    os.kill(other, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_none_is_killed_when_all_were_stopped(kept: Kept) -> None:
    every = [kept.process.pid, *kept.pids.values()]
    for pid in every:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    for pid in every:  # who keeps them goes on first
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    before = dict(kept.pids)
    os.kill(before[0], signal.SIGKILL)
    assert kept.begun() == 0, "the next that begins is the one that was killed here"
    os.kill(before[1], 0)


def test_one_that_ends_is_replaced(kept: Kept) -> None:
    os.kill(kept.pids[0], signal.SIGKILL)
    assert kept.begun() == 0
