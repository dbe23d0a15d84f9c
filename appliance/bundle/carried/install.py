"""Installs the release of a bundle beside the present ones, from nothing but the file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.bundle.carried import machine
from appliance.bundle.carried.archive import Bundle
from appliance.bundle.carried.errors import Refused, Unusable
from appliance.bundle.carried.releases import Release, Releases
from appliance.bundle.carried.signature import PublicKey

Say = Callable[[str], None]
_UNIT, _UNIT_OF_CHECKOUT = "share/appliance.service", "/opt/appliance/.venv/"


def install(bundle: Bundle, prefix: Path, key: PublicKey | None, say: Say) -> Release:
    """Installs the release and returns it. The first one in a folder becomes current; later ones wait for `appliance
    upgrade`.

    Args:
        key: signs the bundles that may be installed. None: the keys pinned in `prefix`; for the first release there the
        bundle's own, which is then pinned.

    Raises BadSignature, NotWhole, Refused, Unusable. If it is interrupted, it leaves no release and can be run
    again."""
    os.umask(0o022)  # root installs, another user runs the box
    releases = Releases(prefix)
    with releases.alone():
        signer = _trusted(bundle, releases, key, say)
        manifest = bundle.manifest
        digest = hashlib.sha256(manifest.encoded()).hexdigest()
        release = releases.find(manifest.version)
        if release is None:
            release = _new(bundle, releases, digest, say)
        elif release.manifest_sha256 != digest:
            raise Refused(
                f"{prefix} has another release {manifest.version}, made from commit {release.commit}; give this one a "
                "version of its own (`appliance bundle make --version`)"
            )
        else:
            say(f"release {manifest.version} is installed already")
        releases.trust(signer)
        if releases.current is None:
            _link_command(releases.prefix)
            releases.switch(release.version)
        return release


def _new(bundle: Bundle, releases: Releases, digest: str, say: Say) -> Release:
    manifest, folder = bundle.manifest, releases.folder(bundle.manifest.version)
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
    if wrong := machine.problems(manifest, releases.prefix, sys.executable):
        raise Refused("\n".join(wrong))
    folder.mkdir(parents=True)
    _fill(bundle, releases, folder, say)
    release = Release(
        manifest.version, manifest.build, manifest.schema, manifest.commit, digest, installed_s=time.time()
    )
    releases.add(release)
    return release


def _trusted(bundle: Bundle, releases: Releases, key: PublicKey | None, say: Say) -> PublicKey:
    trusted = [key] if key is not None else releases.trusted
    if not trusted:
        trusted = [bundle.signer]
        say(
            f"this is the first release in {releases.prefix}: {trusted[0].name}, the key that comes with it, is "
            "trusted from now on; --key names one that you know"
        )
    say(f"checking {bundle.path}")
    return bundle.verify(trusted)


def _fill(bundle: Bundle, releases: Releases, folder: Path, say: Say) -> None:
    manifest, wheels, venv = bundle.manifest, folder / ".wheels", folder / "venv"
    names = sorted(name for name in manifest.files if name.startswith("wheels/"))
    say(f"unpacking {len(names)} packages")
    for name in names:
        bundle.extract(name, wheels / Path(name).name)
    for name in manifest.files:
        if name.startswith("share/") or name == "SBOM.cdx.json":
            bundle.extract(name, folder / (name if name.startswith("share/") else f"share/{name}"))
    say(f"making {venv}")
    # It is made without pip, because Debian keeps ensurepip in a separate package. The bundle's pip installs itself.
    _run([sys.executable, "-I", "-P", "-m", "venv", "--without-pip", str(venv)])
    python, pip = str(venv / "bin" / "python"), next(wheels.glob("pip-*.whl"))
    wanted = folder / ".wheels.txt"
    wanted.write_text(
        "".join(f"{wheels / Path(name).name} --hash=sha256:{manifest.files[name].sha256}\n" for name in names)
    )
    say("installing them")
    options = ["--isolated", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile"]
    _run(
        [python, "-I", str(pip / "pip"), "install", "--quiet", *options, "--require-hashes", "-r", str(wanted)],
        # Settings of this machine's pip, such as constraints, are meant for other environments.
        {"PIP_CONFIG_FILE": os.devnull},
    )
    wanted.unlink()
    shutil.rmtree(wheels)
    say("byte-compiling")
    packages = next(venv.glob("lib/python3*/site-packages"))
    skip = ["-x", manifest.skip] if manifest.skip else []
    subprocess.run(
        [python, "-I", "-P", "-m", "compileall", "-q", "-j", "0", *skip, str(packages)], stdout=subprocess.DEVNULL
    )
    _name_places(folder, releases.prefix)
    _run([python, "-I", "-c", f"import {', '.join(('appliance', *manifest.imports))}"])


def _name_places(folder: Path, prefix: Path) -> None:
    unit = folder / _UNIT
    if unit.is_file():
        unit.write_text(unit.read_text().replace(_UNIT_OF_CHECKOUT, f"{prefix}/current/venv/"))


def _link_command(prefix: Path) -> None:
    (prefix / "bin").mkdir(exist_ok=True)
    link = prefix / "bin" / "appliance"
    link.unlink(missing_ok=True)
    link.symlink_to("../current/venv/bin/appliance")


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output. Raises Unusable with the end of that output."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        output = output or f"exit code {done.returncode}"
        raise Unusable(f"the installation stopped: {output}; run it again once that is mended")
    return done.stdout
