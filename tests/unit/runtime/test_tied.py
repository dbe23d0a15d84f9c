"""A tied command runs as it is, in the same process, and ends with whoever started it."""

import subprocess
import sys

import psutil

from runtime.processes import exec_with_parent

TIE = [sys.executable, "-S", exec_with_parent.__file__]


def test_a_tied_command_is_the_command_itself():
    done = subprocess.run(
        [*TIE, sys.executable, "-c", "import sys; print(*sys.argv[1:]); sys.exit(3)", "a b", "c"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "a b c\n")


def test_a_tied_command_ends_with_its_starter():
    starting = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([*sys.argv[1:], 'sleep', '3600']).pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", starting, *TIE], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(starter.stdout.readline()))
    while child.name() != "sleep":
        assert child.is_running()
    starter.kill()
    starter.wait()
    starter.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert gone == [child]
