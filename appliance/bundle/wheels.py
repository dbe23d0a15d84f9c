"""Collects the wheels of a bundle: those of the lock for this machine and its Python, pip, and the appliance's own.

It runs plain pip, so all settings of its user count: an index, files to find, certificates. A package that the lock has
only as source is built into a wheel here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from appliance.bundle.carried.errors import Unusable

PACKAGES = ("appliance", "runtime", "scheduler", "serve", "train", "weights")
_VERSION = re.compile(r'^version = "[^"]+"$', re.MULTILINE)
_TORCH = re.compile(r"^torch==(?:[^\\\n]*\\\n)*[^\\\n]*$", re.MULTILINE)
_GLIBC = re.compile(r"manylinux_(\d+)_(\d+)")
_GLIBC_BY_NAME = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_NO_BUILDS = ("common", "test", "tracking")
"""Lock files that are not builds: what builds share, and environments beside them."""


def builds(project: Path) -> dict[str, Path]:
    """Returns the lock file of each build, by name."""
    folder = project / "images" / "requirements"
    return {path.stem: path.with_suffix(".txt") for path in folder.glob("*.in") if path.stem not in _NO_BUILDS}


def build_here(project: Path) -> str:
    """Returns the build that is installed in this environment. Raises Unusable."""
    torch = metadata.version("torch")
    for name, lock in builds(project).items():
        if re.search(rf"^torch=={re.escape(torch)}[ ;\\]", lock.read_text(), re.MULTILINE):
            return name
    raise Unusable(f"torch {torch}, which is installed here, is of no lock in images/requirements; name a --build")


def collect(lock: Path, folder: Path, work: Path) -> None:
    """Collects the lock's wheels in `folder`. Raises Unusable."""
    text = lock.read_text()
    torch = _TORCH.search(text)
    if torch is None:
        raise Unusable(f"{lock} has no torch; `make lock` writes it")
    # `===` compares strings, as in images/install.sh: pip may find another build of the same version first.
    (work / "torch.txt").write_text(torch[0].replace("torch==", "torch===", 1) + "\n")
    (work / "others.txt").write_text(text.replace(torch[0], ""))
    for part in ("torch.txt", "others.txt"):
        _pip("wheel", "--no-deps", "--require-hashes", "-r", str(work / part), "-w", str(folder))
    _pip("download", "--no-deps", "--only-binary", ":all:", f"pip=={metadata.version('pip')}", "-d", str(folder))


def copy_sources(project: Path, to: Path, version: str | None) -> str:
    """Copies what the appliance's own wheel is built from. Returns its version. Raises Unusable."""
    for name in PACKAGES:
        shutil.copytree(project / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "setup.py"):
        shutil.copy(project / name, to)
    locks = to / "images" / "requirements"
    locks.mkdir(parents=True)
    for lock in builds(project).values():
        shutil.copy(lock, locks)
    text = (project / "pyproject.toml").read_text()
    if version is not None:
        if not re.fullmatch(r"\d+(\.\d+)*([a-z]+\d+)?", version):
            raise Unusable(f"--version is {version!r}; expected numbers and dots, perhaps with a1, b1 or rc1 behind")
        text = _VERSION.sub(f'version = "{version}"', text, count=1)
    (to / "pyproject.toml").write_text(text)
    found = _VERSION.search(text)
    assert found is not None
    return found[0].split('"')[1]


def own_wheel(sources: Path, folder: Path) -> None:
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", str(sources), "-w", str(folder))


def unpacked_bytes(wheels: Iterable[Path]) -> int:
    total = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            total += sum(info.file_size for info in archive.infolist())
    return total


def oldest_glibc(names: Iterable[str]) -> str:
    """Returns the oldest glibc that all these wheels run with: the oldest that each wheel names, and the newest of
    these."""
    needed = (0, 0)
    for name in names:
        tags = name.removesuffix(".whl").rsplit("-", 1)[-1].split(".")
        named = [(int(found[1]), int(found[2])) for tag in tags if (found := _GLIBC.match(tag))]
        named += [version for tag in tags for known, version in _GLIBC_BY_NAME.items() if tag.startswith(f"{known}_")]
        needed = max(needed, min(named, default=(0, 0)))
    return f"{needed[0]}.{needed[1]}"


def _pip(command: str, *arguments: str) -> None:
    line = [sys.executable, "-P", "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "is neither a file nor a directory" not in line]
        raise Unusable(
            f"pip could not get the packages: {' '.join(lines[-4:])} (its settings count: PIP_INDEX_URL, "
            "PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS; torch for processors is at https://download.pytorch.org/whl/cpu)"
        )
