"""The install script without downloads: its commands, its refusals, and that a second run does nothing; and that
`appliance[client]` suffices for every command that talks to a remote box.

A fake pip records its arguments and environment; everything else of the script is real.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2]
INSTALL = PROJECT / "images" / "install.sh"

# Replaces `python -m pip` in the new environment: records its arguments, and fails if FAIL_ON matches them.
FAKE_PIP = """
import json, os, re, sys
with open(os.environ["PIP_RECORD"], "a") as record:
    settings = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    record.write(json.dumps([sys.argv[1:], settings]) + "\\n")
if "--version" in sys.argv:
    print("pip 99")
    sys.exit(0)
pattern = os.environ.get("FAIL_ON")
if pattern and re.search(pattern, " ".join(sys.argv)):
    sys.exit("ERROR: No matching distribution found")
print("Collecting something")
"""


def run(*options: str, env: dict[str, str] | None = None, script: Path = INSTALL) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("VENV", "APPLIANCE_BUILD", "PYTHON")}
    return subprocess.run(
        [str(script), *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | {"PYTHON": sys.executable} | (env or {}),
    )


@pytest.fixture(autouse=True)
def roomy_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is enough disk, whatever the machine has."""
    df = tmp_path_factory.mktemp("bin") / "df"
    df.write_text("#!/bin/sh\necho header\necho / 1 1 99999999 1% /\n")
    df.chmod(0o755)
    monkeypatch.setenv("PATH", str(df.parent), prepend=os.pathsep)


@pytest.fixture
def box(tmp_path: Path) -> dict[str, str]:
    """An environment with fake pip and packages, so that a run takes a second."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(FAKE_PIP)
    for name in ("torch", "ray", "safetensors", "openai"):
        (packages / f"{name}.py").touch()
    return {"VENV": str(venv), "APPLIANCE_BUILD": "cpu", "PIP_RECORD": str(tmp_path / "record")}


def calls(box: dict[str, str]) -> list[list[str]]:
    lines = Path(box["PIP_RECORD"]).read_text().splitlines() if Path(box["PIP_RECORD"]).exists() else []
    return [arguments for arguments, _ in map(json.loads, lines) if "install" in arguments]


@pytest.mark.parametrize(
    "script", [*sorted((PROJECT / "images").glob("*.sh")), PROJECT / ".ci" / "run"], ids=lambda p: p.name
)
def test_scripts_parse_and_are_executable(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity", "warning", str(script)], check=True)


def test_cuda_pins_torch_so_that_cpu_wheel_cannot_win(tmp_path):
    done = run("--print-commands", "--build", "cuda", "--venv", str(tmp_path / "v"))
    assert re.search(r"torch===\d+\.\d+\.\d+\.txt ", done.stdout), done.stderr
    assert "+cpu" not in done.stdout


def test_torch_is_installed_with_hashes_or_warning(box):
    assert run("--no-compile", env=box).returncode == 0
    (asked,) = Path(box["VENV"]).glob(".torch===*.txt")
    lock = (PROJECT / "images/requirements/cpu.txt").read_text()
    text = asked.read_text()
    assert re.fullmatch(r"torch===\S+( \\\n +--hash=sha256:[0-9a-f]{64})+\n", text), text
    assert all(line in lock for line in re.findall(r"sha256:\w+", text))
    (Path(box["VENV"]) / ".appliance-installed").unlink()
    loud = run("--no-compile", "--unhashed-torch", env=box)
    assert loud.returncode == 0 and "WARNING: --unhashed-torch" in loud.stderr
    assert calls(box)[5][-1].startswith("torch===") and "--require-hashes" not in calls(box)[5]
    assert "--require-hashes" in calls(box)[6]


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_local_builds_use_locked_setuptools(box, build):
    assert run("--no-compile", env=box | {"APPLIANCE_BUILD": build, "PATH": f"{Path('/nothing')}:{os.environ['PATH']}"})
    first, *others = calls(box)
    assert first[-2:] == ["-r", f"{box['VENV']}/.setuptools.txt"] and "--require-hashes" in first
    asked = Path(first[-1]).read_text()
    assert re.fullmatch(r"setuptools==\S+( \\\n +--hash=sha256:[0-9a-f]{64})+\n", asked)
    assert asked in (PROJECT / f"images/requirements/{build}.txt").read_text()
    built = [call for call in others if not any("torch===" in argument for argument in call)]
    assert built and all("--no-build-isolation" in call for call in built)


def test_without_ensurepip_system_pip_installs(tmp_path):
    python, record = tmp_path / "python3", tmp_path / "record"
    (tmp_path / "fake_pip.py").write_text(FAKE_PIP)
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*", ensurepip"*) exit 1 ;;\n'
        f'"-m pip "*) exec {sys.executable} {tmp_path}/fake_pip.py "$@" ;;\n'
        "esac\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "PIP_RECORD": str(record)}
    done, made = run("--no-compile", "--build", "cpu", env=settings), calls(settings)
    assert len(made) == 4, done.stderr
    assert all(call[:4] == ["-m", "pip", "--python", f"{tmp_path}/venv/bin/python"] for call in made)


def test_second_run_installs_only_changes(box, tmp_path):
    copy = tmp_path / "project"
    shutil.copytree(PROJECT / "images", copy / "images")
    shutil.copy(PROJECT / "pyproject.toml", copy)
    script = copy / "images" / "install.sh"
    assert run("--no-compile", env=box, script=script).returncode == 0
    assert len(calls(box)) == 4
    again = run("--no-compile", env=box, script=script)
    assert again.returncode == 0 and again.stderr == "" and len(calls(box)) == 4

    lock = copy / "images" / "requirements" / "cpu.txt"
    lock.write_text(lock.read_text() + "# a comment changes nothing\n")
    assert run("--no-compile", env=box, script=script).returncode == 0 and len(calls(box)) == 4
    with (copy / "pyproject.toml").open("a") as project:
        project.write("\n# new entry point\n")
    assert run("--no-compile", env=box, script=script).returncode == 0
    assert len(calls(box)) == 5 and "--editable" in calls(box)[-1]
    lock.write_text(lock.read_text() + "newpackage==1.0\n")
    assert run("--no-compile", env=box, script=script).returncode == 0 and len(calls(box)) == 9


def test_torch_falls_back_to_pytorch_index_with_message(box):
    done = run("--no-compile", env=box | {"FAIL_ON": r"^(?!.*download\.pytorch\.org).*torch==="})
    assert done.returncode == 0, done.stderr
    assert "is not in your package index" in done.stderr
    first, second = calls(box)[1:3]
    assert "--extra-index-url" not in first
    assert second[second.index("--extra-index-url") + 1] == "https://download.pytorch.org/whl/cpu"


def test_build_is_cuda_if_nvidia_smi_lists_gpu(tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\n[ "$1" = -L ] && echo \'GPU 0: NVIDIA H100 (UUID: x)\'\n[ "$1" != -L ] && echo 590.1\n')
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    done = run("--print-commands", "--venv", str(tmp_path / "v"), env=env)
    assert "requirements/cuda.txt" in done.stdout, done.stderr
    if not Path("/dev/nvidia0").exists():
        smi.unlink()
        assert "requirements/cpu.txt" in run("--print-commands", "--venv", str(tmp_path / "v"), env=env).stdout


def test_wheelhouse_installs_without_index(box, tmp_path):
    wheelhouse = tmp_path / "wheelhouse"
    shutil.copytree(PROJECT / "images", wheelhouse / "images")
    script, options = wheelhouse / "images" / "install.sh", ("--no-compile", "--wheelhouse", str(wheelhouse))
    assert run(*options, env=box, script=script).returncode == 1  # the wheel of the appliance is missing
    wheel = wheelhouse / "appliance-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert run(*options, env=box, script=script).returncode == 0
    assert all("--no-index" in one and one[one.index("--find-links") + 1] == str(wheelhouse) for one in calls(box))
    assert calls(box)[-1][-1] == str(wheel) and "test.txt" not in str(calls(box))
    wheel.write_text("the next release")
    assert run(*options, env=box, script=script).returncode == 0 and len(calls(box)) == 5


# --- client-only installation

EXTRA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["appliance"]["extras"]["client"]
OURS = {"appliance", "runtime", "scheduler", "serve", "train", "weights"}

# Hides all modules that are not ours or installed by the extra, as on a laptop.
ALONE = """
import importlib.abc, importlib.util, sys

class Laptop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else real(name, *rest)
sys.meta_path.insert(0, Laptop())
sys.argv = ["appliance", *sys.argv[1:]]
"""


def packages() -> set[str]:
    """Packages of the extra and their dependencies."""
    found, waiting = set(), [Requirement(text) for text in EXTRA]
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found:
            found.add(name)
            asked = [Requirement(text) for text in metadata.requires(name) or ()]
            waiting += [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def absent() -> set[str]:
    """Modules of this environment that a client-only installation lacks."""
    by_module, wanted = metadata.packages_distributions(), packages()
    there = {name for name, of in by_module.items() if wanted & {canonicalize_name(one) for one in of}}
    return set(by_module) - there - OURS - {"_distutils_hack"}


def test_lock_satisfies_client_extra():
    for text in EXTRA:
        wanted = Requirement(text)
        assert wanted.specifier.contains(metadata.version(wanted.name)), text
    assert not packages() & {"torch", "ray", "vllm", "numpy", "fastapi"}


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("status --url http://127.0.0.1:1", 6, "cannot reach the box"),
        ("model export m --to new --url http://127.0.0.1:1", 6, "cannot reach the box"),
        ("model export m --to new --format merged --url http://127.0.0.1:1", 2, "only the client is installed"),
        ("up", 2, "only the client is installed"),
    ],
)
def test_client_runs_remote_commands_and_refuses_others(absent, line, code, said):
    source = f"ABSENT = {absent!r}\n{ALONE}\nfrom appliance.cli.main import run; run()"
    command = [sys.executable, "-P", "-c", source, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)})
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
