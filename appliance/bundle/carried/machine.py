"""Checks whether a machine can run a bundle's release: its Python, C library, system packages and disk."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from appliance.bundle.carried.archive import Manifest

_ASK_S = 30.0


def problems(manifest: Manifest, disk: Path, python: str) -> list[str]:
    """Returns what is missing and what to do about it. disk: where the release will be. python: makes the
    environment."""
    return [*_host(manifest), *_python(manifest, python), *_system(manifest, python), *_room(manifest, disk)]


def _host(manifest: Manifest) -> Iterator[str]:
    if (platform.system(), platform.machine()) != ("Linux", manifest.machine):
        yield f"this is {platform.system()} on {platform.machine()}; the bundle is for Linux on {manifest.machine}"
    library, version = platform.libc_ver()
    if library and library != "glibc":
        yield f"the C library is {library}; the packages are made for glibc"
    elif version and _numbers(version) < _numbers(manifest.glibc):
        yield f"glibc is {version}; the packages need {manifest.glibc}: a newer release of this Linux"


def _python(manifest: Manifest, python: str) -> Iterator[str]:
    found = "{}.{}".format(*sys.version_info)
    if found != manifest.python or sys.implementation.name != "cpython":
        yield f"{python} is {sys.implementation.name} {found}; the bundle is for CPython {manifest.python}"


def _system(manifest: Manifest, python: str) -> Iterator[str]:
    wanted = manifest.system
    for name, remedy in wanted.get("libraries", {}).items():
        try:
            ctypes.CDLL(name)
        except OSError:
            yield f"{name} is missing: {remedy}"
    for names, remedy in wanted.get("programs", {}).items():
        if not any(shutil.which(name) for name in names.split("|")):
            yield f"{names.replace('|', ' or ')} is missing: {remedy}"
    for name, remedy in wanted.get("headers", {}).items():
        if not (Path(sysconfig.get_path("include")) / name).is_file():
            yield f"{name} of {python} is missing: {remedy}"
    if driver := wanted.get("driver"):
        found = _driver(driver["command"])
        if found is not None and found < driver["least"]:
            yield f"the driver is {found}; needed is {driver['least']} or newer: {driver['remedy']}"


def _driver(command: list[str]) -> int | None:
    """Returns the first number of the driver's version; None without one, as on a machine whose devices come later."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    number = re.match(r"\s*(\d+)", output)
    return int(number[1]) if number else None


def _room(manifest: Manifest, disk: Path) -> Iterator[str]:
    # The wheels lie beside the environment while they are unpacked, and byte code is a fifth of its source's size.
    needed = sum(file.bytes for file in manifest.files.values()) + manifest.installed_bytes * 6 // 5
    free = shutil.disk_usage(disk).free
    if free < needed:
        yield f"{disk} has {free / 1e9:.1f} GB free; the installation needs {needed / 1e9:.1f} GB"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
