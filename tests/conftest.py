"""A test session leaves nothing behind: no process, no Ray session, no shared-memory file. Checked at its end."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")

# A shell starts background jobs with Ctrl-C ignored, and everything below them inherits that: the tests that press it
# would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    files, sessions = _shared_memory(), _ray_sessions()
    yield
    # Python's own helper for shared memory ends with this process.
    running = [
        f"{process.pid} {' '.join(process.cmdline())[:100]}"
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        and "resource_tracker" not in " ".join(process.cmdline())
    ]  # fmt: skip
    boxes = [str(process.pid) for process in psutil.process_iter() if _belongs_to_a_test_box(process)]
    assert not running, f"processes left: {running}"
    assert not boxes, f"processes of a test's box left: {boxes}"
    assert _shared_memory() - files == set()
    assert _ray_sessions() - sessions == set()


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _ray_sessions() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("appliance-*")} | {
        path.name for path in Path(tempfile.gettempdir()).glob("ray/session_*")
    }


def _belongs_to_a_test_box(process: psutil.Process) -> bool:
    try:
        environment = process.environ()
        return "APPLIANCE_BOX" in environment and "pytest-of-" in environment.get("APPLIANCE_DATA_DIR", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
