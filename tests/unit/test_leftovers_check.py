"""The check at the end of every test session finds what a test leaves, with and without pytest-xdist."""

import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.e2e.box_support import unmapped_segments

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAVES_A_FILE = "from pathlib import Path\ndef test_it():\n    Path('/dev/shm/{name}').touch()\n"
LEAVES_A_PROCESS = "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '{name}'])\n"
LEAVES_AN_ORPHAN = "import subprocess\ndef test_it():\n    subprocess.run(['setsid', '-f', 'sleep', '{name}'])\n"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one-process", "two-side-by-side"])
@pytest.mark.parametrize(
    ("left", "code"),
    [(LEAVES_A_FILE, 1), (LEAVES_A_PROCESS, 1), (LEAVES_AN_ORPHAN, 1), ("def test_it(): pass\n", 0)],
    ids=["file", "process", "orphan", "nothing"],
)  # fmt: skip
def test_what_is_left_behind_fails_the_session(tmp_path, left, code, workers):
    name = f"{os.getpid()}{len(workers)}1"
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(left.format(name=name))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *workers, str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    Path("/dev/shm", name).unlink(missing_ok=True)
    subprocess.run(["pkill", "-f", f"sleep {name}"], check=False)
    assert (ended.returncode, "left behind" in ended.stdout) == (code, bool(code)), ended.stdout


def test_a_segment_is_left_when_no_living_process_maps_it():
    segment = shared_memory.SharedMemory(create=True, size=1)  # named psm_..., as vLLM's are
    try:
        assert segment.name not in unmapped_segments(), "somebody works with it"
        segment.close()
        assert segment.name in unmapped_segments()
    finally:
        segment.unlink()
