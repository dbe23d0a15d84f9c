"""Compiles the gateway's hot modules with mypyc into the environment of the Python that runs this (images/install.sh).

    python images/compile_gateway.py

Does nothing where they stand already, and nothing but say so where there is no C compiler or no header of Python: then
the same files run as Python. What it makes, and when that is used: appliance/gateway/compiled.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from appliance.gateway import compiled  # noqa: E402

# Builds of other sources that stay, so that going back to a branch costs nothing.
KEPT = 4
# An addition of bytes, as mypyc writes it: the call, and the place that a traceback would name.
_ADDITION = re.compile(r'CPyBytes_Concat\([^}]*?CPy_AddTraceback\("([^"]+)", "[^"]*", (\d+)')


def main() -> int:
    """Exit status 0: compiled, or cannot be compiled here; 1: failed, and mypyc or the compiler has said why."""
    target = compiled.directory()
    if target.is_dir():
        return 0
    if missing := _missing():
        print(f"{missing}: the gateway runs as Python, at about half the speed", file=sys.stderr)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        made = _build(Path(folder))
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # another run was faster
                raise
    check = [sys.executable, "-c", "import sys, appliance.gateway.main as m; sys.exit(m.FORM != 'compiled')"]
    if subprocess.run(check, cwd=PROJECT).returncode:
        shutil.rmtree(target)
        return 1
    _forget_old(target.parent)
    return 0


def _missing() -> str:
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    if not shutil.which(compiler):
        return f"no C compiler ({compiler})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"no {header}"


def _build(folder: Path) -> Path:
    """Returns a directory of extension modules."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.chdir(PROJECT)
    # What is not ours counts as untyped, so that the result does not hang on the stubs of whoever built it.
    flags = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", "--config-file="]
    flags.append(f"--cache-dir={folder / 'cache'}")
    sources = [f"appliance/gateway/{name.replace('.', '/')}.py" for name in compiled.MODULES]
    # Higher levels take twice as long to compile and run no faster: the time goes into Python's own objects.
    extensions = mypycify([*flags, *sources], opt_level="1", debug_level="0", target_dir=str(folder / "c"))
    if leaks := leaks_in(folder / "c"):
        sys.exit(f'bytes + bytes leaks its left operand when mypyc compiles it; write b"%b%b" instead: {leaks}')
    command = Distribution({"name": "gateway", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "tmp")
    command.ensure_finalized()
    command.run()
    made = folder / "made"
    package = folder / "lib" / "appliance" / "gateway"
    for path in (folder / "lib").rglob("*.so"):
        # The one library with the code of all stands at the top; each module's shim lies as its source does.
        to = made / (path.relative_to(package) if path.is_relative_to(package) else path.name)
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(to)
    return made


def leaks_in(folder: Path) -> list[str]:
    """Where the C files of a directory add bytes: FILE:LINE, sorted.

    mypyc before 2.0 never frees the left operand of `bytes + bytes` (it is said to be stolen by CPyBytes_Concat).
    """
    text = "".join(path.read_text() for path in sorted(folder.rglob("*.c")))
    return sorted({f"{file}:{line}" for file, line in _ADDITION.findall(text)})


def _forget_old(folder: Path) -> None:
    builds = sorted((path for path in folder.iterdir() if path.name[0] != "."), key=lambda path: path.stat().st_mtime)
    for path in builds[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
