"""A test session leaves nothing behind: no process, no Ray session, no shared-memory file. This is checked at its end.

Each process of a session (several with pytest-xdist) checks the processes that it started: its children, and orphans
with its mark in their environment. Files have no such mark: the session checks those that its tests claimed
(tests/claims.py) and every other new file. If another session or a box outside tests runs on this machine, the other
files are only reported.
"""

import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from runtime.processes.kernel import settle_garbage

SHARED_MEMORY = Path("/dev/shm")
BEFORE = pytest.StashKey[set[str]]()
LEFT = pytest.StashKey[list[str]]()
OTHERS = pytest.StashKey[bool]()
MARK, CLAIMS, BOX = "TESTS_RUN_BY", "TESTS_CLAIMS", "APPLIANCE_BOX"

# Tests do not judge speed: Hypothesis's limit of 200 ms per example, which a busy machine sometimes exceeds, is off.
# The examples are the same at each run; `make soak` draws new ones.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("drawn", settings.get_profile("untimed"), derandomize=False)
settings.load_profile("untimed")

# A shell starts background jobs with Ctrl-C ignored, which children inherit: tests that send Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Collection creates nearly all long-lived objects (torch and others): the collector is off, then skips them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    settle_garbage()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise nanobind reports uncollected objects on stderr at exit


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE], session.config.stash[LEFT] = _files(), []
    os.environ[MARK] = uuid.uuid4().hex
    session.config.stash[OTHERS] = _others_run()
    if not hasattr(session.config, "workerinput"):
        descriptor, os.environ[CLAIMS] = tempfile.mkstemp(prefix="tests-claims-")
        os.close(descriptor)


# The last wrapper, so that the result of a pytest-xdist worker is set when xdist sends its output.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    config = session.config
    if hasattr(config, "workerinput"):
        # A worker also sees resources that other workers still use: it reports only processes that it started.
        config.workeroutput["left"] = _started()
        return result
    left = config.stash[LEFT] + _started()
    claimed = Path(os.environ[CLAIMS])
    parts = claimed.read_text().split()
    claimed.unlink()
    others = config.stash[OTHERS] or _others_run()
    for name in sorted(_files() - config.stash[BEFORE]):
        if not others or any(part in Path(name).name for part in parts):
            left.append(f"shared memory or Ray session: {name}")
        else:
            print(f"\nnew file, by these tests or by others on this machine: {name}")
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nleft behind by these tests:", *left, sep="\n  ")
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] += getattr(node, "workeroutput", {}).get("left", [])


def _started() -> list[str]:
    """Processes that this process started, directly or indirectly, and that still run."""
    own = psutil.Process()
    found = {*own.children(recursive=True), *filter(_is_marked, psutil.process_iter())} - {own}
    return [line for process in found if (line := _told_of(process))]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _others_run() -> bool:
    """Whether a process of another session, or of a box outside tests, runs."""
    mark = os.environ[MARK]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ() if process.pid != os.getpid() else {}
            if environment.get(MARK, mark) != mark or (BOX in environment and MARK not in environment):
                return True
    return False


def _told_of(process: psutil.Process) -> str:
    """A line about a leftover process; empty if it has ended, and for Python's shared-memory tracker."""
    try:
        command = " ".join(process.cmdline())
        over = process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in command
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return "" if over else f"process {process.pid}: {command[:100]}"


def _files() -> set[str]:
    temporary = Path(tempfile.gettempdir())
    places = (*SHARED_MEMORY.iterdir(), *temporary.glob("appliance-*"), *temporary.glob("ray/session_*"))
    return {str(path) for path in places}
