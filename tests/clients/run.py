"""Tests real clients, each in its own environment, on a box with SmolLM2-135M: `make clients`.

    python -m tests.clients.run                     all: install, start a box, test, write docs/clients.md
    python -m tests.clients.run openai anthropic    some: only their rows
    python -m tests.clients.run --left              those without a result for this commit

Exit status 1: a check failed that clients.py does not list as known. Takes half an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.clients import table
from tests.clients.clients import CLIENTS, Client
from tests.clients.table import ROOT, Row

MODEL, EMBEDDING_MODEL = "smollm2-135m", "smollm2-embed"
_TRY_S = 1200
_TOLD_CHARS = 300
_INSTALL_S = 900
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of clients; default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "clients", help="for environments and the box")
    parser.add_argument("--port", type=int, default=8798)
    parser.add_argument("--left", action="store_true", help="only clients without a result for this commit")
    options = parser.parse_args(argv)
    commit = _commit()
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    if unknown := set(options.names) - {client.name for client in chosen}:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(client.name for client in CLIENTS)}")
    if options.left:
        done = {row.client for row in table.recorded() if row.commit == commit}
        chosen = [client for client in chosen if client.name not in done]
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    troubles = {client.name: _installed(client, folder) for client in chosen}
    if not chosen:
        return 0
    box = Box(folder / "box", options.port)
    box.up()
    surprises: list[str] = []
    try:
        for client in chosen:
            row = _tried(client, folder, box, troubles[client.name], commit)
            table.put(table.drawn(table.record([row])))
            surprises += _surprises(client, row)
    finally:
        box.down()
    return bool(surprises)


class Box:
    """A box of four CPU devices with a chat model, and the same weights as an embedding model."""

    def __init__(self, data: Path, port: int) -> None:
        self.data, self.url = data, f"http://127.0.0.1:{port}"
        self._port = port

    def up(self) -> None:
        if not self._runs():
            self._appliance("up", "--detach", "--port", str(self._port), "--devices", "4")
        if MODEL not in self._appliance("model", "list"):
            self._appliance("model", "import", MODEL)
        if EMBEDDING_MODEL not in self._appliance("model", "list"):
            self._appliance("model", "import", str(self._embedding()), "--name", EMBEDDING_MODEL)

    def _runs(self) -> bool:
        try:
            self._appliance("status")
        except SystemExit:
            return False
        return True

    def down(self) -> None:
        self._appliance("down")

    @property
    def model_directory(self) -> Path:
        return self.data / "models" / MODEL / "v1"

    def environment(self) -> dict[str, str]:
        """Environment variables from the documentation of clients, and those for the scripts."""
        key = (self.data / "first-key").read_text().strip()
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": key,
            "MODEL": MODEL,
            "MODEL_DIRECTORY": str(self.model_directory),
            "EMBEDDING_MODEL": EMBEDDING_MODEL,
        }

    def _embedding(self) -> Path:
        """A copy of the model's files, configured as an embedding model."""
        folder = self.data.with_name("embedding-model")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model_directory, folder, ignore=shutil.ignore_patterns("manifest.json"))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaModel"]}))
        return folder

    def _appliance(self, *words: str) -> str:
        command = [sys.executable, "-m", "appliance.cli.main", *words, "--data-dir", str(self.data)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"appliance {' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout


def _installed(client: Client, folder: Path) -> str:
    """Install the client; return the error, or "" on success."""
    began_s = time.monotonic()
    try:
        python_of(client, folder)
    except NotInstalled as error:
        print(f"{client.name}: not installed: {error}", flush=True)
        return f"not installed: {error}"
    print(f"{client.name}: installed, {time.monotonic() - began_s:.0f} s", flush=True)
    return ""


def _commit() -> str:
    """The commit of the code under test; "" outside a repository."""
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def _tried(client: Client, folder: Path, box: Box, trouble: str, commit: str) -> Row:
    today = time.strftime("%Y-%m-%d")
    if trouble:
        return Row(client.name, "", today, {}, trouble, commit)
    commands = f"{path_of(client, folder)}{os.pathsep}{os.environ.get('PATH', '')}"
    # The client must not see this process's environment.
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = folder / f"{client.name}.log"
    with open(log, "w") as output:
        try:
            subprocess.run(
                command_of(client, folder),
                env=around | box.environment() | {"PATH": commands},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TRY_S,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            trouble = f"not done after {_TRY_S} s"
    checks = {name: _one_line(failed) for name, failed in table.verdicts(log.read_text()).items()}
    if not checks and not trouble:
        trouble = _last_words(log.read_text())
    row = Row(client.name, version_of(client, folder), today, checks, trouble, commit)
    print(f"{row.client} {row.version}: {row.checks} {row.trouble}", flush=True)
    return row


def _last_words(output: str) -> str:
    """The error of a script without any check (in JavaScript it is before the stack trace), or its last output."""
    errors = re.findall(r"^\w*Error\b.*", output, re.MULTILINE)
    return _one_line(errors[-1] if errors else output[-_TOLD_CHARS:]) or "said nothing"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_TOLD_CHARS].replace("|", "/")


def _surprises(client: Client, row: Row) -> list[str]:
    failed = [name for name, why in row.checks.items() if why and name not in client.known]
    return failed + ([row.trouble] if row.trouble and "trouble" not in client.known else [])


# --- an environment for each client, from the package registry with the user's settings of pip and npm


class NotInstalled(Exception):
    """The registry lacks a package, or the installation takes too long."""


def python_of(client: Client, folder: Path) -> str:
    """Path of the interpreter in the client's environment, created if missing. Raises NotInstalled."""
    if client.own or client.npm:
        if client.npm:
            _npm(client, folder / client.name)
        return sys.executable
    home = folder / client.name
    python = home / "bin" / "python"
    done = home / "installed"
    if not (done.exists() and python.exists()):
        shutil.rmtree(home, ignore_errors=True)
        _output([sys.executable, "-m", "venv", str(home)])
        _output([str(python), "-m", "pip", "install", "--quiet", *client.packages])
        done.touch()
    return str(python)


def path_of(client: Client, folder: Path) -> Path:
    """Folder of the client's commands."""
    home = folder / client.name
    return home / "node_modules" / ".bin" if client.npm else home / "bin"


def version_of(client: Client, folder: Path) -> str:
    if client.npm:
        return str(json.loads((_package(client, folder / client.name) / "package.json").read_text())["version"])
    return _output([python_of(client, folder), "-c", _VERSION, client.name]).strip()


def command_of(client: Client, folder: Path) -> list[str]:
    """The command that runs its script. Scripts in JavaScript are copied to their packages to find them."""
    script = Path(__file__).with_name(client.script)
    if script.suffix != ".mjs":
        return [python_of(client, folder), str(script)]
    home = folder / client.name
    for file in (script, script.with_name("report.mjs")):
        shutil.copy(file, home)
    return ["node", str(home / script.name)]


def _npm(client: Client, home: Path) -> None:
    if _package(client, home).exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("no npm here")
    home.mkdir(parents=True, exist_ok=True)
    _output([npm, "install", "--no-fund", "--no-audit", "--prefix", str(home), *client.packages])


def _package(client: Client, home: Path) -> Path:
    """The client's own package: the first of `packages` for npm."""
    return home / "node_modules" / client.packages[0]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed within {_INSTALL_S // 60} minutes") from None
    if done.returncode:
        raise NotInstalled((done.stderr or done.stdout).strip()[-300:])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
