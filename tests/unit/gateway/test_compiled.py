"""The gateway's modules compiled and as they are: each test here runs on the form that is installed; the other one must
pass too, and a compiled module must never stand for a file that was edited since."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance import gateway
from appliance.gateway import compiled
from images import compile_gateway

PROJECT = Path(__file__).resolve().parents[3]
ON_THE_HOT_PATH = ("test_repeated_head.py", "test_relay_inference.py", "test_access_log.py", "test_spending.py")


def says_form(root: Path, *options: str) -> str:
    command = [sys.executable, *options, "-c", "import appliance.gateway as g; print(g.FORM, g.__path__[-1])"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    assert said[1] == str(root / "appliance" / "gateway")
    return said[0]


@pytest.mark.skipif(gateway.FORM == "interpreted", reason="nothing is compiled here: all tests run as Python")
def test_the_same_tests_pass_as_python() -> None:
    tests = [str(Path(__file__).parent / name) for name in ON_THE_HOT_PATH]
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, "-X", "gateway=interpreted", "-m", "pytest", *options, *tests]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project of this package alone."""
    for name in ("__init__.py", "gateway"):
        source, target = PROJECT / "appliance" / name, tmp_path / "appliance" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir()
            shutil.copy(source, target)
    return tmp_path


def test_an_edited_file_is_never_hidden(copy: Path) -> None:
    assert says_form(copy) == gateway.FORM
    assert says_form(copy, "-X", "gateway=interpreted") == "interpreted"
    edited = copy / "appliance" / "gateway" / "answers" / "usage.py"
    edited.write_text(edited.read_text() + "\n")
    assert says_form(copy) == "interpreted"


def test_what_cannot_be_loaded_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "directory", lambda: tmp_path)
    path = ["sources"]
    assert compiled.use(path) == "interpreted"
    (tmp_path / "broken__mypyc.so").write_bytes(b"not a library")
    assert compiled.use(path) == "interpreted" and path == ["sources"]
    assert "broken__mypyc" not in sys.modules


def test_what_is_compiled_exists() -> None:
    assert all((compiled.HERE / (name.replace(".", "/") + ".py")).is_file() for name in compiled.MODULES)


def test_bytes_are_never_added_in_compiled_files(tmp_path: Path) -> None:
    """Each addition of bytes leaked its left operand: the head of every error answer, a canary's whole request."""
    (tmp_path / "sum.py").write_text("def both(a: bytes, b: bytes) -> bytes:\n    return a + b\n")
    (tmp_path / "one.py").write_text('def both(a: bytes, b: bytes) -> bytes:\n    return b"%b%b" % (a, b)\n')
    program = "from mypyc.build import mypycify\nfor name in 'sum', 'one': mypycify([name + '.py'], target_dir=name)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    assert [compile_gateway.leaks_in(tmp_path / name) for name in ("sum", "one")] == [["sum.py:2"], []]
