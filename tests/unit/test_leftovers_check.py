"""The check at the end of every test session finds what a test leaves, also with pytest-xdist."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAVES_ALL_KINDS = """
import os, subprocess, sys
from pathlib import Path
def test_a_file_of_its_own():
    Path(os.environ['TESTS_CLAIMS']).write_text('claimed-{name}')
    Path('/dev/shm/claimed-{name}').touch()
def test_a_file():
    Path('/dev/shm/{name}').touch()
def test_a_process():
    subprocess.Popen(['sleep', '{name}1'])
def test_an_orphan():
    subprocess.run([sys.executable, '-c', "import subprocess; subprocess.Popen(['sleep', '{name}2'])"])
"""


def test_session_fails_for_what_its_tests_left_and_reports_what_others_may_have(tmp_path: Path):
    name = f"{os.getpid()}1"
    ended = session_of(tmp_path, LEAVES_ALL_KINDS.format(name=name))
    for path in (name, f"claimed-{name}"):
        Path("/dev/shm", path).unlink(missing_ok=True)
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] in (["sleep", f"{name}1"], ["sleep", f"{name}2"]):
            process.kill()
    unknown, _, left = ended.stdout.partition("left behind by these tests:")
    assert ended.returncode == 1 and f"/dev/shm/claimed-{name}" in left
    assert f"/dev/shm/{name}\n" not in left and f"/dev/shm/{name}\n" in unknown
    assert f"sleep {name}1" in left and f"sleep {name}2" in left, left


def test_session_that_leaves_nothing_passes(tmp_path: Path):
    ended = session_of(tmp_path, "def test_it(): pass\n")
    assert ended.returncode == 0 and "left behind" not in ended.stdout, ended.stdout


def session_of(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2", str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
