"""The check at the end of every test session finds what a test leaves, with and without pytest-xdist."""

import importlib.util
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from tests.e2e.box_support import WholeBox

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAVES_NOTHING = "def test_it(): pass\n"
LEAVES_ALL_KINDS = """
import os, subprocess
from pathlib import Path
def test_a_file_of_its_own():
    Path(os.environ['TESTS_CLAIMS']).write_text('claimed-{name}')
    Path('/dev/shm/claimed-{name}').touch()
def test_a_file():
    Path('/dev/shm/{name}').touch()
def test_a_process():
    subprocess.Popen(['sleep', '{name}1'])
def test_an_orphan():
    subprocess.run(['setsid', '-f', 'sleep', '{name}2'])
"""


SIDE_BY_SIDE = pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one-process", "two-side-by-side"])


def left_by(folder: Path, workers: tuple[str, ...], others: bool) -> tuple[str, str, int]:
    """The names' distinct part, what the session prints of what is left, and its exit code."""
    name = f"{os.getpid()}{len(workers)}{others:d}1"
    ended = session_of(folder, LEAVES_ALL_KINDS.format(name=name), workers, others)
    for path in (name, f"claimed-{name}"):
        Path("/dev/shm", path).unlink(missing_ok=True)
    subprocess.run(["pkill", "-f", f"sleep {name}"], check=False)
    return name, ended.stdout, ended.returncode


@SIDE_BY_SIDE
def test_what_is_left_behind_fails_the_session(tmp_path, workers):
    name, told, code = left_by(tmp_path, workers, others=False)
    assert code == 1, told
    left = told.partition("left behind by these tests:")[2]
    assert f"shared memory or Ray session: /dev/shm/{name}\n" in left and f"/dev/shm/claimed-{name}" in left
    assert f"sleep {name}1" in left and f"sleep {name}2" in left


@SIDE_BY_SIDE
def test_beside_others_a_file_that_nobody_claimed_is_told_and_what_is_the_sessions_own_fails_it(tmp_path, workers):
    name, told, code = left_by(tmp_path, workers, others=True)
    unknown, _, left = told.partition("left behind by these tests:")
    assert code == 1 and f"/dev/shm/{name}\n" in unknown.partition("of others that run")[2]
    assert f"/dev/shm/claimed-{name}" in left and f"/dev/shm/{name}\n" not in left


@SIDE_BY_SIDE
@pytest.mark.parametrize("others", [True, False])
def test_where_nothing_is_left_the_session_passes(tmp_path, workers, others):
    ended = session_of(tmp_path, LEAVES_NOTHING, workers, others)
    assert ended.returncode == 0 and "left behind" not in ended.stdout, ended.stdout


def test_a_box_that_no_test_started_is_anothers(monkeypatch):
    """And so is what another session started; what this one starts is not."""
    asked = conftest()
    for marks, are in (({"APPLIANCE_BOX": "1"}, True), ({"TESTS_RUN_BY": "x"}, True), ({"TESTS_RUN_BY": "me"}, False)):
        process = SimpleNamespace(pid=0, environ=lambda marks=marks: marks)
        monkeypatch.setattr(psutil, "process_iter", lambda process=process: [process])
        monkeypatch.setenv("TESTS_RUN_BY", "me")
        assert asked._others_are_at_work() is are


def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conftest_of_all", CONFTEST)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def session_of(folder: Path, tests: str, workers: tuple[str, ...], others: bool) -> subprocess.CompletedProcess[str]:
    """A session of these tests alone, beside others or not."""
    (folder / "conftest.py").write_text(
        f"{CONFTEST.read_text()}\n\ndef _others_are_at_work():\n    return {others}\n"
        # Of what another test session leaves meanwhile, these tests are not to tell.
        f"\n\n_all_files = _files\n\n\ndef _files():\n    return {{f for f in _all_files() if '{os.getpid()}' in f}}\n"
    )
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *workers, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_segments_without_an_owner_in_their_names_are_a_boxs_if_its_processes_mapped_them(tmp_path, monkeypatch):
    own = shared_memory.SharedMemory(create=True, size=1)  # named psm_..., as vLLM's are
    others = shared_memory.SharedMemory(create=True, size=1)
    try:
        box = WholeBox(tmp_path)
        monkeypatch.setattr(box, "running", lambda: {os.getpid(): "this test"})
        others.close()
        box.note_segments()
        assert box.segments_left() == set(), "somebody works with it"
        own.close()
        assert box.segments_left() == {own.name}
    finally:
        own.unlink()
        others.unlink()
    assert box.segments_left() == set()
