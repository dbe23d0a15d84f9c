"""Makes an environment for each client from the package registry, with the user's own settings of pip and npm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.clients import Client

_INSTALL_S = 900
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


class NotInstalled(Exception):
    """The registry does not have it, or it takes longer than minutes."""


def python_of(client: Client, folder: Path) -> str:
    """Of the client's environment; made if it is not there. Raises NotInstalled."""
    if client.own or client.npm:
        if client.npm:
            _npm(client, folder / client.name)
        return sys.executable
    home = folder / client.name
    python = home / "bin" / "python"
    done = home / "installed"
    if not (done.exists() and python.exists()):
        shutil.rmtree(home, ignore_errors=True)
        _install(home, python, client.packages)
        done.touch()
    return str(python)


def path_of(client: Client, folder: Path) -> Path:
    """Where its commands are."""
    home = folder / client.name
    return home / "node_modules" / ".bin" if client.npm else home / "bin"


def version_of(client: Client, folder: Path) -> str:
    if client.npm:
        return str(json.loads((_package(client, folder / client.name) / "package.json").read_text())["version"])
    return _output([python_of(client, folder), "-c", _VERSION, client.name]).strip()


def command_of(client: Client, folder: Path) -> list[str]:
    """What runs its script. A script in JavaScript finds packages from where it is, so it goes beside them."""
    script = Path(__file__).with_name(client.script)
    if script.suffix != ".mjs":
        return [python_of(client, folder), str(script)]
    home = folder / client.name
    for file in (script, script.with_name("report.mjs")):
        shutil.copy(file, home)
    return ["node", str(home / script.name)]


def _install(home: Path, python: Path, packages: tuple[str, ...]) -> None:
    _output([sys.executable, "-m", "venv", str(home)])
    _output([str(python), "-m", "pip", "install", "--quiet", *packages])


def _npm(client: Client, home: Path) -> None:
    if _package(client, home).exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("no npm here")
    home.mkdir(parents=True, exist_ok=True)
    _output([npm, "install", "--no-fund", "--no-audit", "--prefix", str(home), *client.packages])


def _package(client: Client, home: Path) -> Path:
    """Of npm's packages the first, which is the client."""
    return home / "node_modules" / client.packages[0]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed within {_INSTALL_S // 60} minutes") from None
    if done.returncode:
        raise NotInstalled((done.stderr or done.stdout).strip()[-300:])
    return done.stdout
