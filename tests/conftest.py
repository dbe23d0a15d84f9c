"""A test session leaves nothing behind: no process, no Ray session, no shared-memory file. Checked at its end."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")
BEFORE = pytest.StashKey[set[str]]()
LEFT = pytest.StashKey[list[str]]()

# A shell starts background jobs with Ctrl-C ignored, and everything below them inherits that: the tests that press it
# would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE], session.config.stash[LEFT] = _files(), []


# Last of the wrappers, so that what a pytest-xdist worker found is there when xdist sends its output.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    config = session.config
    if hasattr(config, "workerinput"):
        # A worker also sees what its neighbours are still using: only its own children are its to answer for.
        config.workeroutput["left"] = _children()
        return result
    left = config.stash[LEFT] + _children()
    left += [f"shared memory or Ray session: {name}" for name in sorted(_files() - config.stash[BEFORE])]
    left += [f"process of a test's box: {p.pid}" for p in psutil.process_iter() if _belongs_to_a_test_box(p)]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nleft behind by these tests:", *left, sep="\n  ")
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] += getattr(node, "workeroutput", {}).get("left", [])


def _children() -> list[str]:
    """What this process started and did not end. Python's own helper for shared memory ends with the process."""
    return [
        f"process {process.pid}: {' '.join(process.cmdline())[:100]}"
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        and "resource_tracker" not in " ".join(process.cmdline())
    ]  # fmt: skip


def _files() -> set[str]:
    temporary = Path(tempfile.gettempdir())
    places = (*SHARED_MEMORY.iterdir(), *temporary.glob("appliance-*"), *temporary.glob("ray/session_*"))
    return {str(path) for path in places}


def _belongs_to_a_test_box(process: psutil.Process) -> bool:
    try:
        environment = process.environ()
        return "APPLIANCE_BOX" in environment and "pytest-of-" in environment.get("APPLIANCE_DATA_DIR", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
