"""The CUDA lock has wheels for every supported Python, and the appliance's extras require the right torch."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[3]
REQUIREMENTS = PROJECT / "images" / "requirements"
CUDA = (REQUIREMENTS / "cuda.txt").read_text()
PYTHONS = ("3.11", "3.12", "3.13")
# Pure Python packages that publish no wheels: pip builds them from source.
BUILT_FROM_SOURCE = {"deepspeed", "rouge-score"}


def pinned(name: str) -> tuple[int, ...]:
    (version,) = re.findall(rf"^{name}==([\d.]+)", CUDA, re.MULTILINE)
    return tuple(map(int, version.split(".")))


def test_cuda_python_packages_have_one_version():
    """cuda-python 12 contains the files of cuda-bindings and has no wheel for 3.13; from 13 it only depends on
    cuda-bindings.
    """
    assert pinned("cuda-python")[0] >= 13
    assert pinned("cuda-python")[:2] == pinned("cuda-bindings")[:2]


def test_cuda_lock_includes_torchvision_for_vision_models():
    """vLLM's model classes for Qwen2.5-VL, Qwen3-VL and Qwen3.5 import torchvision, even for text alone.

    No CPU build of torchvision matches the locked torch."""
    assert re.search(r"^torchvision==[\d.]+ \\$", CUDA, re.MULTILINE), "held back by a marker, or not there"


@pytest.fixture(scope="module")
def uv(tmp_path_factory) -> Path:
    """Return the path of uv, which downloads only metadata; pip would download gigabytes of wheels."""
    found = shutil.which("uv")
    if found:
        return Path(found)
    to = tmp_path_factory.mktemp("uv")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(to), "uv"], check=True)
    return to / "bin" / "uv"


@pytest.mark.soak
@pytest.mark.parametrize("python", PYTHONS)
def test_cuda_lock_has_wheels_for_every_python(python, tmp_path, uv):
    """Pass the package index of pip's settings to uv, because uv does not read pip's settings."""
    lock = tmp_path / "cuda.txt"
    blocks = re.split(r"(?m)^(?=[a-zA-Z])", CUDA)
    kept = [block for block in blocks if block.partition("==")[0] not in BUILT_FROM_SOURCE]
    lock.write_text("".join(kept))
    command = [uv, "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_35"]
    command += ["--target", tmp_path / "none", "--cache-dir", tmp_path / "cache", "-r", lock]
    pips = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_CERT": "SSL_CERT_FILE"}
    settings = {ours: os.environ[theirs] for theirs, ours in pips.items() if theirs in os.environ}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    named = [line for line in done.stderr.splitlines() if line.startswith(" + ")]
    assert len(named) > 150


@pytest.fixture
def extras(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(PROJECT / "setup.py"))
    return given["extras_require"]


def torch_of(extra):
    return next(one.specifier for one in map(Requirement, extra) if one.name == "torch")


def test_cuda_extra_rejects_cpu_build_of_torch(extras):
    """For the requirement 2.13.0, pip also accepts 2.13.0+cpu, and prefers 2.13.0+cpu if an index has both."""
    cpu, cuda = torch_of(extras["cpu"]), torch_of(extras["cuda"])
    version = next(iter(cpu)).version
    plain = version.partition("+")[0]
    assert cpu.contains(version) and not cuda.contains(version)
    assert cuda.contains(plain) and cuda.contains(f"{plain}+cu130")
