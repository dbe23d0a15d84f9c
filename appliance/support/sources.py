"""What a bundle has, read from this machine: configuration, logs, versions, what the kernel and the drivers say."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from appliance.config import BoxConfig
from appliance.doctor import facts
from appliance.doctor.checks import findings
from appliance.paths import BoxPaths
from runtime.devices import kinds
from runtime.log_files import end_of, logs_in

LOG_BYTES = 2_000_000  # of each log, its end
ALL_LOGS_BYTES = 60_000_000
COMMAND_S = 20.0
PACKAGES = ("torch", "vllm", "deepspeed", "ray", "transformers", "fastapi", "pydantic", "numpy", "appliance")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle. source: where it is from, in words."""

    name: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Missing:
    name: str
    why: str


def secrets_of(paths: BoxPaths) -> Iterator[str]:
    """What this box alone knows and could have written somewhere. Nothing of it is packed."""
    for path in (paths.ray_token, paths.gateway_token, paths.first_key, paths.data_dir / "join.token"):
        try:
            yield path.read_text().strip()
        except OSError:
            continue


def state(paths: BoxPaths) -> Part | Missing:
    """What the main process last said of itself: of a box that does not run any more, why."""
    return _file("box.json", paths.state_file)


def machine(config: BoxConfig, *, runs: bool) -> Iterator[Part | Missing]:
    """runs: the box of this configuration is up."""
    yield Part("config.json", config.model_dump_json(indent=1), "the configuration as it was resolved")
    yield Part("versions.json", json.dumps(_versions(), indent=1), "this environment")
    found = [asdict(finding) for finding in findings(facts.read(config, runs=runs))]
    yield Part("doctor.json", json.dumps(found, indent=1), "appliance doctor --all")
    for name, path in (
        ("meminfo", "/proc/meminfo"),
        ("pressure", "/proc/pressure/memory"),
        ("cpuinfo", "/proc/cpuinfo"),
    ):
        yield _file(f"machine/{name}.txt", Path(path))
    for name, command in (*_COMMANDS, *((tool[0], tool) for tool in kinds.present().report_commands)):
        yield _output(f"machine/{name}.txt", command)


_COMMANDS = (
    ("df", ("df", "-h")),
    ("processes", ("ps", "--ppid", "2", "-p", "2", "-N", "-o", "pid,ppid,stat,rss,etimes,pcpu,comm")),
    ("kernel", ("dmesg", "--ctime", "--level", "emerg,alert,crit,err,warn")),
)


def logs(folder: Path, *, since_s: float) -> Iterator[Part | Missing]:
    """The ends of all logs written since then, the newest first. since_s: as time.time() counts."""
    left = ALL_LOGS_BYTES
    for one in logs_in(folder):
        name = f"logs/{one.name}"
        if one.changed_s < since_s:
            yield Missing(name, "not written lately")
        elif left <= 0:
            yield Missing(name, f"the newer logs have {ALL_LOGS_BYTES // 1_000_000} MB already")
        elif one.is_packed:
            yield Missing(name, "compressed")
        else:
            text = _end(folder / one.name)
            left -= len(text)
            if text:  # Ray begins hundreds that stay empty
                yield Part(name, text, str(folder / one.name))


def _end(path: Path) -> str:
    text, before = end_of(path, LOG_BYTES)
    # The first line is cut: half a secret is not known as one.
    return f"[{before} bytes before]\n" + text.partition("\n")[2] if before else text


def _file(name: str, path: Path) -> Part | Missing:
    try:
        return Part(name, path.read_text(errors="replace"), str(path))
    except OSError as error:
        return Missing(name, error.strerror or type(error).__name__)


def _output(name: str, command: tuple[str, ...]) -> Part | Missing:
    if shutil.which(command[0]) is None:
        return Missing(name, f"{command[0]} is not here")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Missing(name, f"{' '.join(command)}: {error}")
    if done.returncode != 0:
        return Missing(name, f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return Part(name, done.stdout, " ".join(command))


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "system": platform.platform(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
