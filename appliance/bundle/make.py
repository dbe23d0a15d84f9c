"""Makes a bundle from the checkout that this code runs in, for this machine's Python and build."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.bundle import wheels
from appliance.bundle.carried.archive import END, MANIFEST, SIGNATURE, SIGNER, Content, Manifest
from appliance.bundle.carried.errors import Refused, Unusable
from appliance.bundle.signing import SecretKey
from appliance.store.migrator import migrations

PROJECT = Path(__file__).resolve().parents[2]
IMPORTS = ("torch", "ray", "safetensors", "openai")  # as images/install.sh checks them
_START = """import sys

if sys.version_info < (3, 11):
    sys.exit("error: this needs Python 3.11 or newer; `sh FILE` looks for it")
from pathlib import Path

from appliance.bundle.carried.main import main

sys.exit(main(sys.argv[1:], Path(sys.argv[0]).resolve()))
"""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """What goes into a bundle. files: paths, by their name in the bundle. texts: contents that were made here, by
    name."""

    version: str
    build: str
    commit: str
    imports: tuple[str, ...]
    system: dict[str, Any]
    skip: str
    files: Mapping[str, Path]
    texts: Mapping[str, bytes] = field(default_factory=dict)


def make(target: Path, key: SecretKey, *, build: str | None, version: str | None, say: Say) -> Manifest:
    """Raises Unusable, Refused."""
    if not (PROJECT / "images" / "requirements").is_dir():
        raise Unusable(
            f"a bundle is made from a checkout, and {PROJECT} is not one; call it in one, after `make setup`"
        )
    build = build or wheels.build_here(PROJECT)
    if build not in wheels.builds(PROJECT):
        raise Unusable(f"there is no lock of a build {build!r}; there are {', '.join(sorted(wheels.builds(PROJECT)))}")
    with tempfile.TemporaryDirectory(prefix="appliance-bundle-") as folder:
        work = Path(folder)
        (work / "wheels").mkdir()
        say(f"collecting the packages of the {build} build")
        wheels.collect(wheels.builds(PROJECT)[build], work / "wheels", work)
        say("making the appliance's own wheel")
        number = wheels.copy_sources(PROJECT, work / "sources", version)
        wheels.own_wheel(work / "sources", work / "wheels")
        say("writing and signing")
        return write(target, _parts(number, build, work / "wheels"), key)


def write(target: Path, parts: Parts, key: SecretKey) -> Manifest:
    """Writes a new file. Raises Refused."""
    if target.exists():
        raise Refused(f"{target} exists; name a new file")
    texts = {**_carried(), SIGNER: key.public.text.encode(), **parts.texts}
    found = {name: _content(path) for name, path in parts.files.items()}
    found |= {name: Content(hashlib.sha256(text).hexdigest(), len(text)) for name, text in texts.items()}
    wheel_paths = [path for name, path in parts.files.items() if name.startswith("wheels/")]
    made = Manifest(
        version=parts.version,
        build=parts.build,
        commit=parts.commit,
        made=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        schema=max(migrations()),
        python="{}.{}".format(*sys.version_info),
        machine=platform.machine(),
        glibc=wheels.oldest_glibc(path.name for path in wheel_paths),
        soabi=sysconfig.get_config_var("SOABI"),
        installed_bytes=wheels.unpacked_bytes(wheel_paths),
        imports=parts.imports,
        system=parts.system,
        skip=parts.skip,
        header_sha256="",
        files=dict(sorted(found.items())),
    )
    made = Manifest(**{**vars(made), "header_sha256": hashlib.sha256(made.header).hexdigest()})
    signed = key.sign(made.encoded(), f"appliance {made.version} {made.build} {made.commit}")
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(made.header)
            # Wheels are compressed already.
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, text in sorted(texts.items()):
                    archive.writestr(name, text)
                for name, path in sorted(parts.files.items()):
                    archive.write(path, name)
                archive.writestr(MANIFEST, made.encoded())
                archive.writestr(SIGNATURE, signed.text)
                archive.comment = END
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return made


def _parts(version: str, build: str, folder: Path) -> Parts:
    requirements = PROJECT / "images" / "requirements"
    files = {f"wheels/{path.name}": path for path in folder.glob("*.whl")}
    files |= {f"share/docs/{path.name}": path for path in (PROJECT / "docs").iterdir() if path.is_file()}
    for unit in ("appliance.service", "appliance-power.service"):
        files[f"share/{unit}"] = PROJECT / "images" / unit
    bill = [sys.executable, str(PROJECT / "images" / "sbom.py"), "--build", build, "--version", version]
    done = subprocess.run(bill, capture_output=True, cwd=PROJECT)
    if done.returncode != 0:
        raise Unusable(f"the bill of materials could not be made: {done.stderr.decode(errors='replace')[-500:]}")
    return Parts(
        version=version,
        build=build,
        commit=_commit(),
        imports=IMPORTS,
        system=json.loads((requirements / "system.json").read_text()).get(build, {}),
        skip=(requirements / "not-compiled.txt").read_text().strip(),
        files=files,
        texts={"SBOM.cdx.json": done.stdout},
    )


def _carried() -> dict[str, bytes]:
    """The code that checks and installs a bundle, under the names that it has here."""
    folder = PROJECT / "appliance" / "bundle" / "carried"
    texts = {path.relative_to(PROJECT).as_posix(): path.read_bytes() for path in sorted(folder.glob("*.py"))}
    texts |= {f"{name}/__init__.py": b"" for name in ("appliance", "appliance/bundle")}
    return {"__main__.py": _START.encode(), **texts}


def _content(path: Path) -> Content:
    with open(path, "rb") as file:
        return Content(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _commit() -> str:
    """Returns the commit of the checkout, with a "+" if files were changed since, or "unknown" if git does not know
    it."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    runs = [
        subprocess.run([git, "-C", str(PROJECT), *command], capture_output=True, text=True)
        for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain"))
    ]
    if any(done.returncode for done in runs):
        return "unknown"
    return runs[0].stdout.strip() + ("+" if runs[1].stdout.strip() else "")
