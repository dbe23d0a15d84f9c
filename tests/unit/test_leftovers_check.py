"""The check at the end of every test session finds what a test leaves, with and without pytest-xdist."""

import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.e2e.box_support import unmapped_segments

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAVES_NOTHING = "def test_it(): pass\n"
LEAVES_ALL_KINDS = """
import subprocess
from pathlib import Path
def test_a_file():
    Path('/dev/shm/{name}').touch()
def test_a_process():
    subprocess.Popen(['sleep', '{name}1'])
def test_an_orphan():
    subprocess.run(['setsid', '-f', 'sleep', '{name}2'])
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one-process", "two-side-by-side"])
def test_what_is_left_behind_fails_the_session(tmp_path, workers):
    name = f"{os.getpid()}{len(workers)}1"
    ended = session_of(tmp_path, LEAVES_ALL_KINDS.format(name=name), workers)
    Path("/dev/shm", name).unlink(missing_ok=True)
    subprocess.run(["pkill", "-f", f"sleep {name}"], check=False)
    assert ended.returncode == 1, ended.stdout
    left = ended.stdout.partition("left behind by these tests:")[2]
    assert f"shared memory or Ray session: /dev/shm/{name}" in left
    assert f"sleep {name}1" in left and f"sleep {name}2" in left


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one-process", "two-side-by-side"])
def test_where_nothing_is_left_the_session_passes(tmp_path, workers):
    ended = session_of(tmp_path, LEAVES_NOTHING, workers)
    assert ended.returncode == 0 and "left behind" not in ended.stdout, ended.stdout


def session_of(folder: Path, tests: str, workers: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A session of these tests alone."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *workers, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_a_segment_is_left_when_no_living_process_maps_it():
    segment = shared_memory.SharedMemory(create=True, size=1)  # named psm_..., as vLLM's are
    try:
        assert segment.name not in unmapped_segments(), "somebody works with it"
        segment.close()
        assert segment.name in unmapped_segments()
    finally:
        segment.unlink()
