"""What `appliance[client]` installs is enough for every command that talks to a box elsewhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["appliance"]["extras"]["client"]
OURS = {"appliance", "runtime", "scheduler", "serve", "train", "weights"}

# What is neither ours nor brought by the extra is not there, as on a laptop.
ALONE = """
import importlib.abc, importlib.util, sys

class Laptop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else real(name, *rest)
sys.meta_path.insert(0, Laptop())
sys.argv = ["appliance", *sys.argv[1:]]
"""


def packages() -> set[str]:
    """Those of the extra, and what they ask for."""
    found, waiting = set(), [Requirement(text) for text in EXTRA]
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found:
            found.add(name)
            asked = [Requirement(text) for text in metadata.requires(name) or ()]
            waiting += [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def absent() -> set[str]:
    """Modules of this environment that a laptop has not."""
    by_module, wanted = metadata.packages_distributions(), packages()
    there = {name for name, of in by_module.items() if wanted & {canonicalize_name(one) for one in of}}
    return set(by_module) - there - OURS - {"_distutils_hack"}


def run(absent: set[str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = f"ABSENT = {absent!r}\n{ALONE}\n{program}"
    command = [sys.executable, "-P", "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


def test_the_lock_has_what_the_extra_asks_for():
    for text in EXTRA:
        wanted = Requirement(text)
        assert wanted.specifier.contains(metadata.version(wanted.name)), text
    assert not packages() & {"torch", "ray", "vllm", "numpy", "fastapi"}


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("status --url http://127.0.0.1:1", 6, "cannot reach the box"),
        ("model export m --to new --url http://127.0.0.1:1", 6, "cannot reach the box"),
        ("model export m --to new --format merged --url http://127.0.0.1:1", 2, "the client alone"),
        ("up", 2, "the client alone"),
    ],
)
def test_commands_for_a_box_elsewhere_work_and_others_say_why_not(absent, line, code, said):
    done = run(absent, "from appliance.cli.main import run; run()", *line.split())
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
