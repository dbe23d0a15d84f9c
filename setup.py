"""The extras of the wheel. Those of a build (`cpu`, `cuda`) are the pins of its lock, as metadata: the lock is the one
truth, and `pip install 'appliance[cpu]'` takes the same versions as images/install.sh, though without their hashes."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def pins(lock: Path) -> list[str]:
    requirements = (
        line.partition(" --hash=")[0].strip() for line in re.sub(r"\\\n", "", lock.read_text()).splitlines()
    )
    return [one for one in requirements if one and not one.startswith("#")]


chosen = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["appliance"]["extras"]
builds = {name: pins(HERE / "images" / "requirements" / f"{name}.txt") for name in ("cpu", "cuda")}
setup(extras_require=chosen | builds)
