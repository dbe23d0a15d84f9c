"""Bundles for tests: real ones, whose wheels are a few lines long, or the appliance's own without what it needs."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from appliance.bundle.make import Parts, write
from appliance.bundle.signing import SecretKey

COMMAND = """import sys


def run():
    print("appliance of", sys.prefix)
"""

PIP = r"/site-packages/pip/"
"""Not byte-compiled here: it would be a sixth of what an installation takes."""


def wheel(folder: Path, name: str, version: str, files: dict[str, str], script: str = "") -> Path:
    """A wheel as pip takes it. script: the entry point of the command that has its name."""
    info = f"{name}-{version}.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        texts[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name} = {script}\n"
    record = "".join(f"{path},{_hash(text)},{len(text.encode())}\n" for path, text in texts.items())
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**texts, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return made


def pip_wheel(folder: Path) -> Path:
    """The pip that is installed here, as the wheel that it came in."""
    pip = metadata.distribution("pip")
    made = folder / f"pip-{pip.version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for file in pip.files or ():
            path = Path(str(pip.locate_file(file)))
            if file.parts[0] != ".." and path.suffix != ".pyc" and path.is_file():
                archive.write(path, str(file))
    return made


def parts(
    folder: Path,
    version: str,
    own: Path | None = None,
    modules: dict[str, str] | None = None,
    further: dict[str, Path] | None = None,
    **fields: object,
) -> Parts:
    """own: the appliance's wheel; None: one that does nothing but say where it runs, with further `modules`. further:
    files of the bundle."""
    (folder / version).mkdir(parents=True)
    texts = {"appliance/__init__.py": "", "appliance/command.py": COMMAND, **(modules or {})}
    own = own or wheel(folder / version, "appliance", version, texts, "appliance.command:run")
    files = {f"wheels/{path.name}": path for path in (own, pip_wheel(folder / version))} | (further or {})
    made = Parts(version, "small", "0123456789ab", (), {}, PIP, files)
    return replace(made, **fields)  # type: ignore[arg-type]


def bundle(folder: Path, version: str, key: SecretKey, **fields: object) -> Path:
    target = folder / f"appliance-{version}.run"
    write(target, parts(folder, version, **fields), key)  # type: ignore[arg-type]
    return target


def run(*command: object, code: int = 0, **named: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, **named)  # type: ignore
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def _hash(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
