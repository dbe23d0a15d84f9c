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


def without_builds_of(pinned: list[str], others: list[str]) -> list[str]:
    """The same pins, each without the build that the other lock names. To pip torch 2.13.0+cpu is a 2.13.0, and the
    newest: it took that one for GPUs too wherever the index has both, and 9 GB found no GPU."""
    local = {one.partition("==")[0]: one.partition("==")[2] for one in others if "+" in one}
    return [
        f"{one},!={local[name]}" if (name := one.partition("==")[0]) in local and "+" not in one else one
        for one in pinned
    ]


chosen = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["appliance"]["extras"]
builds = {name: pins(HERE / "images" / "requirements" / f"{name}.txt") for name in ("cpu", "cuda")}
builds["cuda"] = without_builds_of(builds["cuda"], builds["cpu"])
setup(extras_require=chosen | builds)
