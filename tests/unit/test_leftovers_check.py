"""The check at the end of every test session finds what a test leaves, with and without pytest-xdist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAVES_A_FILE = "from pathlib import Path\ndef test_it():\n    Path('/dev/shm/{name}').touch()\n"
LEAVES_A_PROCESS = "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '{name}'])\n"


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one-process", "xdist"])
@pytest.mark.parametrize(
    ("left", "code"), [(LEAVES_A_FILE, 1), (LEAVES_A_PROCESS, 1), ("def test_it(): pass\n", 0)],
    ids=["file", "process", "nothing"],
)  # fmt: skip
def test_what_is_left_behind_fails_the_session(tmp_path, left, code, workers):
    name = f"{os.getpid()}{len(workers)}1"
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(left.format(name=name))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    Path("/dev/shm", name).unlink(missing_ok=True)
    subprocess.run(["pkill", "-f", f"sleep {name}"], check=False)
    assert (ended.returncode, "left behind" in ended.stdout) == (code, bool(code)), ended.stdout
