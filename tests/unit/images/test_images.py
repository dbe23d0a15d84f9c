"""Dockerfiles, compose file, systemd units and locks refer to existing files and have safe settings."""

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
IMAGES = PROJECT / "images"
DOCKERFILES = sorted(IMAGES.glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return pairs (instruction, arguments) of a Dockerfile without comments; joins continued lines."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda p: p.name)
def test_dockerfile_copies_existing_files_and_runs_install_sh(dockerfile):
    build = dockerfile.suffix.removeprefix(".")
    steps = instructions(dockerfile)
    for name, arguments in steps:
        if name == "COPY" and (stage := re.match(r"--from=(\w+)", arguments)):
            assert any(n == "FROM" and a.endswith(f" AS {stage[1]}") for n, a in steps), arguments
        elif name == "COPY":
            *sources, _ = [a for a in shlex.split(arguments) if not a.startswith("--")]
            assert all((PROJECT / source).exists() for source in sources), arguments
    runs = [arguments for name, arguments in steps if name == "RUN" and "install.sh" in arguments]
    assert len(runs) == 2 and all(f"--build {build}" in r for r in runs) and "--packages-only" in runs[0]
    assert not [a for name, a in steps if name == "RUN" and re.search(r"\bpip3? install|conda |uv ", a)]
    assert ("USER", "appliance") in steps and any(name == "HEALTHCHECK" for name, _ in steps)
    assert steps[-2][0] == "ENTRYPOINT" and steps[-1][0] == "CMD" and '"up"' in steps[-1][1]


def test_compose_services_have_shared_memory_or_loopback_ports():
    compose = yaml.safe_load((IMAGES / "compose.yaml").read_text())
    others = {name: service for name, service in compose["services"].items() if "build" not in service}
    assert set(compose["services"]) - set(others) == {"cpu", "cuda"}
    for service in others.values():
        assert service["profiles"] == ["monitoring"] and all(p.startswith("127.0.0.1:") for p in service["ports"])
        files = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./")]
        assert all((IMAGES / name).exists() for name in files)
    for name in ("cpu", "cuda"):
        service = compose["services"][name]
        assert (IMAGES / service["build"]["context"]).resolve() == PROJECT
        assert (PROJECT / service["build"]["dockerfile"]).name == f"Dockerfile.{name}"
        assert service["shm_size"].endswith("8gb}") and service["profiles"] == [name]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_systemd_unit_starts_declared_console_script():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(IMAGES / "appliance.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts and arguments[0] == "up"
    assert unit["Service"]["RemoveIPC"] == "no" and unit["Service"]["KillMode"] == "mixed"
    assert "images/install.sh" in (IMAGES / "appliance.service").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(("unit", "most"), [("appliance", 30)])
def test_systemd_unit_is_valid_and_hardened(unit: str, most: int, tmp_path: Path):
    """`most`: highest allowed exposure, as ten times systemd's level: 0 (safest) to 100."""
    known = tmp_path / f"{unit}.service"
    # `verify` requires an existing program, and the appliance is not installed here.
    known.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", (IMAGES / known.name).read_text(), flags=re.M))
    told = subprocess.run(["systemd-analyze", "verify", known], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={most}", "--no-pager", str(known)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_locks_pin_hashes_and_match_requested_versions():
    named = {}
    for build in ("cpu", "cuda", "test"):
        text = re.sub(r" \\\n", " ", (IMAGES / "requirements" / f"{build}.txt").read_text())
        pins = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
        # pip's --require-hashes needs the SHA-256 of each file of a package.
        form = r"([a-z0-9._-]+)(\[[a-z,-]+\])?==\S+( ;[^\\]*?)?( +--hash=sha256:[0-9a-f]{64})+$"
        named[build] = {match[1] for pin in pins if (match := re.match(form, pin))}
        assert not [pin for pin in pins if not re.match(form, pin)]
        assert not any("://" in pin or pin.startswith("-") for pin in pins)
        if build == "test":
            continue
        asked = (IMAGES / "requirements" / f"{build}.in").read_text() + (IMAGES / "requirements/common.in").read_text()
        for wanted in re.findall(r"^([a-z0-9-]+)==(\S+)", asked, re.M):
            assert any(pin.split(" ")[0] == "==".join(wanted) for pin in pins), wanted
    tests = set(re.findall(r"^([a-z0-9-]+)", (IMAGES / "requirements" / "test.in").read_text(), re.M))
    assert tests <= named["test"] and not tests & (named["cpu"] | named["cuda"])
    assert not named["test"] & named["cpu"] & named["cuda"]


def test_make_clean_keeps_environment_outside_the_tree(tmp_path: Path):
    shown = subprocess.run(
        ["make", "-n", "clean", f"VENV={tmp_path}"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    assert "rm -rf .venv " in shown and str(tmp_path) not in shown
