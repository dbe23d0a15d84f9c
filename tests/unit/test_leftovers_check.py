"""Every pytest run, also with pytest-xdist, checks at its end that its tests left no files and processes behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.parametrize("others", [False, True])
def test_session_fails_for_own_leftovers_and_reports_unknown_ones(tmp_path: Path, others: bool):
    name = f"{os.getpid()}{others:d}1"
    ended = session_of(tmp_path, LEAVES_ALL_KINDS.format(name=name), others)
    for path in (name, f"claimed-{name}"):
        Path("/dev/shm", path).unlink(missing_ok=True)
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] in (["sleep", f"{name}1"], ["sleep", f"{name}2"]):
            process.kill()
    unknown, _, left = ended.stdout.partition("left behind by these tests:")
    assert ended.returncode == 1 and f"/dev/shm/claimed-{name}" in left
    assert (f"/dev/shm/{name}\n" in left) != others and (f"/dev/shm/{name}\n" in unknown) == others
    assert f"sleep {name}1" in left and f"sleep {name}2" in left, left


def test_session_without_leftovers_passes(tmp_path: Path):
    ended = session_of(tmp_path, "def test_it(): pass\n", others=False)
    assert ended.returncode == 0 and "left behind" not in ended.stdout, ended.stdout


def session_of(folder: Path, tests: str, others: bool) -> subprocess.CompletedProcess[str]:
    """Run pytest on these tests. others: whether the check believes that other pytest runs are active."""
    (folder / "conftest.py").write_text(
        f"{CONFTEST.read_text()}\n\ndef _others_run():\n    return {others}\n"
        f"\n\n_all_files = _files\n\n\ndef _files():\n    return {{f for f in _all_files() if '{os.getpid()}' in f}}\n"
    )
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2", str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
