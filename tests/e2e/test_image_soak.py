"""The CPU image, built from its Dockerfile and started as recommended: no root, a read-only root file system, no
capability, limited shared memory. The base is built from Debian packages, so no image registry is needed."""

import json
import resource
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
BASE, IMAGE = "docker.io/library/python:3.11-slim-bookworm", "localhost/appliance:cpu"
MIRROR = "http://deb.debian.org/debian"
READY_S = 300.0
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (shutil.which("podman") and shutil.which("mmdebstrap")),
        reason="no container tool here (Debian: apt-get install podman mmdebstrap)",
    ),
]


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"podman {arguments[0]}: {done.returncode}: {done.stderr[-4000:]}"
    return done


def settings_of_pip() -> dict[str, str]:
    """pip settings of this machine, by name without section."""
    told = subprocess.run(["pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    rows = (line.partition("=") for line in told.splitlines())
    return {name.partition(".")[2]: value.strip("'\"") for name, _, value in rows}


Means = tuple[tuple[str, ...], tuple[str, ...]]
"""Options of podman and of `podman run` that containers need to start on this machine."""


def lower_limits() -> tuple[str, ...]:
    """Options with lower limits: podman's defaults are above its own, so a root needs CAP_SYS_RESOURCE to set them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return "--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=30000:30000"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    if podman("image", "exists", BASE, check=False).returncode != 0:
        packages = "--include=python3.11,python3.11-venv,libpython3.11-dev,ca-certificates"
        base = tmp_path_factory.mktemp("base") / "base.tar"
        subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", str(base), MIRROR], check=True)
        podman("import", str(base), BASE)
    return BASE


@pytest.fixture(scope="module")
def means(base: str) -> Means:
    """The fewest options with which a container starts. crun refuses mixed control groups v1 and v2, runc does not."""
    said = ""
    for of_podman in ((), ("--runtime", "runc")):
        for of_run in ((), lower_limits()):
            tried = podman(*of_podman, "run", "--rm", "--network", "host", *of_run, base, "/bin/true", check=False)
            if tried.returncode == 0:
                if of_podman or of_run:
                    print(f"containers start here with {' '.join((*of_podman, *of_run))}: podman's defaults: untested")
                return of_podman, of_run
            said = tried.stderr.strip()
    pytest.skip(f"no container starts on this machine: {said}")


@pytest.fixture(scope="module")
def image(means: Means, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("image")
    settings = settings_of_pip()
    kept = {name: settings[name] for name in ("index-url", "extra-index-url", "find-links", "cert") if name in settings}
    conf = folder / "pip.conf"
    conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in kept.items()))
    local = {word.removeprefix("file://") for value in kept.values() for word in value.split()}
    there = {Path(word).parent if word.endswith("/simple") else Path(word) for word in local if word[0] == "/"}
    # pip skips a missing folder; podman refuses to mount it.
    mounts = [f"--volume={path}:{path}:ro" for path in sorted(there) if path.exists()]
    podman(
        *means[0],
        *("build", "--format", "docker", "--network", "host", "-f", "images/Dockerfile.cpu", "-t", IMAGE),
        *(f"--secret=id=pip.conf,src={conf}", *mounts, str(PROJECT)),
    )
    return IMAGE


@pytest.fixture
def box(image: str, means: Means) -> Iterator[tuple[str, int]]:
    """The name of a running container, and its port on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = f"appliance-{uuid.uuid4().hex[:8]}"
    podman(
        *(*means[0], "run", *means[1], "--detach", "--name", name, "--network", "host"),
        *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all"),
        *("--security-opt", "no-new-privileges", "--shm-size", "2g", "--volume", f"{name}:/data:U", image),
        *("up", "--data-dir", "/data", "--host", "127.0.0.1", "--port", str(port), "--devices", "2"),
    )
    try:
        yield name, port
    finally:
        podman("rm", "--force", "--time", "10", name, check=False)
        podman("volume", "rm", "--force", name, check=False)


def inside(name: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return podman("exec", name, *command, check=check)


def test_image_serves_without_root_on_read_only_system(box: tuple[str, int]):
    name, port = box
    began_s = time.monotonic()
    while podman("healthcheck", "run", name, check=False).returncode != 0:
        running = podman("inspect", "--format", "{{.State.Running}}", name).stdout.strip()
        assert running == "true" and time.monotonic() - began_s < READY_S, podman("logs", name).stdout[-4000:]
        time.sleep(1.0)
    ready_s = time.monotonic() - began_s
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        assert answer.status == 200
    assert inside(name, "id", "-u").stdout.strip() == "1000"
    assert "Read-only file system" in inside(name, "touch", "/opt/x", check=False).stderr
    told = inside(name, "sh", "-c", "grep -E 'CapEff|NoNewPrivs' /proc/self/status; df -B1 /dev/shm | tail -1").stdout
    assert "CapEff:\t0000000000000000" in told and "NoNewPrivs:\t1" in told and str(2 << 30) in told
    status = json.loads(inside(name, "appliance", "status", "--data-dir", "/data", "-o", "json").stdout)
    assert len(status["devices"]) == 2 and not status["degraded"], status
    found = json.loads(inside(name, "appliance", "doctor", "--data-dir", "/data", "-o", "json", check=False).stdout)
    states = {one["check"]: one["state"] for one in found["data"]}
    assert states["box"] == "ok", found
    key = inside(name, "cat", "/data/first-key").stdout.strip()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)["object"] == "list"
    changed = {line for line in podman("diff", name).stdout.splitlines() if not line.startswith(("C /etc", "A /run"))}
    size_gb = int(podman("image", "inspect", "--format", "{{.Size}}", IMAGE).stdout) / 1e9
    print(f"the image has {size_gb:.2f} GB, and its box was ready after {ready_s:.0f} s")
    podman("stop", "--time", "180", name)
    assert podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0", podman("logs", name).stdout
    assert not {line for line in changed if " /opt" in line or " /usr" in line}
