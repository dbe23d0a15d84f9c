"""The extras of the wheel, as setup.py gives them to setuptools."""

import runpy
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def extras(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(PROJECT / "setup.py"))
    return given["extras_require"]


def torch_of(extra):
    return next(one.specifier for one in map(Requirement, extra) if one.name == "torch")


def test_the_extra_for_gpus_never_takes_the_build_for_processors(extras):
    """pip holds 2.13.0+cpu for a 2.13.0, and for a newer one, wherever an index has both."""
    cpu, cuda = torch_of(extras["cpu"]), torch_of(extras["cuda"])
    version = next(iter(cpu)).version
    plain = version.partition("+")[0]
    assert cpu.contains(version) and not cuda.contains(version)
    assert cuda.contains(plain) and cuda.contains(f"{plain}+cu130")
