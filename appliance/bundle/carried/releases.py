"""Keeps releases side by side in one folder, and which of them is current.

    PREFIX/releases/VERSION/venv, share, release.json     release.json is written last: without it there is no release
    PREFIX/current -> releases/VERSION                    swapped by rename(2)
    PREFIX/switches.json                                  what was current before, for the way back
    PREFIX/trusted-keys/ID.pub                            whose bundles are installed here
    PREFIX/bin/appliance -> ../current/venv/bin/appliance

An environment cannot be moved, so it is made where it stays. Its scripts name it by its own path and not by `current`,
so the processes of a running box go on in their own release.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.bundle.carried.errors import Refused, Unusable
from appliance.bundle.carried.signature import PublicKey


@dataclass(frozen=True)
class Release:
    """schema: the newest that its database may have. manifest_sha256: identifies the bundle that it came in."""

    version: str
    build: str
    schema: int
    commit: str
    manifest_sha256: str
    installed_s: float


class Releases:
    def __init__(self, prefix: Path):
        self.prefix = prefix.resolve()

    @classmethod
    def of_environment(cls, environment: Path) -> Releases:
        """Returns the folder of releases that this virtual environment belongs to. Raises Refused."""
        release = environment.resolve().parent
        if release.parent.name != "releases" or not (release / "release.json").is_file():
            raise Refused(
                f"{environment} is not in a folder of releases: this appliance was installed from a checkout, not from "
                "a bundle; take a backup, and install the other release over it (docs/operations.md, Upgrade)"
            )
        return cls(release.parent.parent)

    def folder(self, version: str) -> Path:
        return self.prefix / "releases" / version

    def command(self, version: str) -> Path:
        return self.folder(version) / "venv" / "bin" / "appliance"

    @property
    def current(self) -> str | None:
        try:
            target = os.readlink(self.prefix / "current")
        except FileNotFoundError:
            return None
        return Path(target).name

    def find(self, version: str) -> Release | None:
        try:
            return Release(**json.loads((self.folder(version) / "release.json").read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise Unusable(f"{self.folder(version)}/release.json cannot be read: {error}") from error

    def known(self, version: str) -> Release:
        """Raises Refused."""
        if (found := self.find(version)) is None:
            there = ", ".join(one.version for one in self.all()) or "none"
            raise Refused(f"release {version} is not installed in {self.prefix}; there: {there}")
        return found

    def all(self) -> list[Release]:
        """Lists the releases, the oldest installation first."""
        folder = self.prefix / "releases"
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        found = [release for name in names if (release := self.find(name)) is not None]
        return sorted(found, key=lambda release: release.installed_s)

    @property
    def before(self) -> str | None:
        """Returns the release that was current before this one; ways back do not count."""
        current = self.current
        for switch in reversed(self._switches()):
            if switch["to"] == current and not switch["back"] and switch["from"] is not None:
                return str(switch["from"])
        return None

    def switch(self, version: str, *, back: bool = False) -> None:
        """Makes a release current. If it is interrupted, either the old or the new one is current. Raises Refused."""
        self.known(version)
        said = {"from": self.current, "to": version, "back": back, "at_s": time.time()}
        write(self.prefix / "switches.json", json.dumps([*self._switches(), said], indent=1))
        link = self.prefix / f".current-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("releases") / version)
        link.replace(self.prefix / "current")
        _sync(self.prefix)

    def add(self, release: Release) -> None:
        """Writes release.json, which makes the folder a release."""
        write(self.folder(release.version) / "release.json", json.dumps(asdict(release), indent=1))

    def remove(self, version: str) -> None:
        """Removes a release. Raises Refused for the current one and the one before it."""
        self.known(version)
        if version in (self.current, self.before):
            raise Refused(f"release {version} is the current one, or the one that `appliance rollback` goes back to")
        (self.folder(version) / "release.json").unlink()
        shutil.rmtree(self.folder(version))

    @property
    def trusted(self) -> list[PublicKey]:
        folder = self.prefix / "trusted-keys"
        return [PublicKey.given(str(path)) for path in sorted(folder.glob("*.pub"))] if folder.is_dir() else []

    def trust(self, key: PublicKey) -> None:
        (self.prefix / "trusted-keys").mkdir(exist_ok=True)
        write(self.prefix / "trusted-keys" / f"{key.name}.pub", key.text)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Allows one change at a time. Raises Refused."""
        self.prefix.mkdir(parents=True, exist_ok=True)
        with open(self.prefix / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refused(f"another installation, upgrade or rollback works in {self.prefix}") from error
            yield

    def _switches(self) -> list[dict[str, object]]:
        try:
            return list(json.loads((self.prefix / "switches.json").read_text()))
        except FileNotFoundError:
            return []


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; it is on disk when this returns."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
