"""A whole box for tests, driven as users do: by the command and the OpenAI SDK."""

import atexit
import contextlib
import functools
import ipaddress
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from appliance.paths import BoxPaths
from serve.core.spec import segment_prefix_of
from tests.claims import claim
from weights.format.names import encode_name

COMMAND = str(Path(sys.executable).with_name("appliance"))
SHARED_MEMORY = "/dev/shm/"
LOGS = {
    "controller": "controller.log",
    "gateway": "gateway.log",
    "engine": "engine-*.log",
    "rank": "*-rank*.log",
    "warm parent": "warm-*.log",
}
PROGRAMS = {
    "raylet": "/raylet",
    "ray's head": "/gcs_server",
    "supervisor": "ray::",
    "node's agent": "ray::Node",
    "engine's supervisor": "ray::Replica",
    "rank's supervisor": "ray::RankHost",
}
ENGINE_FILES = ("psm_", "vllm", "sem.", "torch")
DEMO_DATA = Path(__file__).parents[2] / "appliance" / "demo_data"


def gsm8k(kind: str, count: int) -> bytes:
    """The shortest examples, with half the tokens of the first examples, so a step takes half the arithmetic."""
    return "\n".join(sorted((DEMO_DATA / f"gsm8k_{kind}.jsonl").read_text().splitlines(), key=len)[:count]).encode()


@functools.cache
def starter_folder(steps: int) -> Path:
    """The starter's checkpoint, made once per process and deleted at its end."""
    kept = tempfile.mkdtemp(prefix="starter-")
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    command = [sys.executable, "-m", "tests.starter", f"{kept}/starter", str(steps)]
    subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).parents[2], capture_output=True)
    return Path(kept, "starter")


class WholeBox:
    """One box with its own data directory and port."""

    def __init__(self, data_dir: Path):
        self.data_dir, self.port = data_dir, free_port()
        self.key = ""
        self._segments: set[str] = set()
        claim(*self._names())

    # --- actions of a user

    def run(self, *arguments: str, code: int = 0, timeout_s: float = 900) -> str:
        """Run an `appliance` command, whose exit code must be `code`; return stdout."""
        if arguments[0] == "down":
            self.note_segments()
        done = subprocess.run(
            [COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, env=self.environment()
        )
        said = f"appliance {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == code, said
        return done.stdout

    def ask(self, *arguments: str, **named: Any) -> Any:
        return json.loads(self.run(*arguments, "-o", "json", **named))

    def submit(self, model: str, file: str | Path, options: str, *more: str) -> str:
        """Submit a job; return its id. file: a local path or the id of an upload. options: as on the command line."""
        return self.ask("job", "submit", "--model", model, "--file", str(file), *options.split(), *more)["id"]

    def tune(
        self,
        model: str,
        file: str | bytes,
        *,
        method: str = "supervised",
        judge: dict[str, Any] | None = None,
        devices: int | None = 2,
        request: dict[str, Any] | None = None,
        **hyperparameters: Any,
    ) -> str:
        """Create a job with the SDK; return its id. file: id or content. devices: maximum. request: more fields."""
        return (
            self.client(max_retries=5)
            .fine_tuning.jobs.create(
                model=model,
                training_file=file if isinstance(file, str) else self.upload(file),
                method={"type": method, method: {**(judge or {}), "hyperparameters": hyperparameters}},
                extra_body={"max_devices": devices} if devices else None,
                **(request or {}),
            )
            .id
        )

    def tuned(self, job_id: str, timeout_s: int = 600) -> str:
        """Wait for a job, which must succeed; return its model."""
        self.run("job", "wait", job_id, "--timeout", str(timeout_s), timeout_s=timeout_s + 100)
        return self.client(max_retries=5).fine_tuning.jobs.retrieve(job_id).fine_tuned_model

    def greedy(self, model: str, question: str, tokens: int = 24) -> tuple[str, list[str], list[float]]:
        """(version, tokens, log-probabilities) of a greedy answer."""
        answer = self.client(max_retries=5).chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            temperature=0,
            logprobs=True,
        )
        made = answer.parse()
        assert made.model in (model, model.partition(":ckpt-")[0])
        found = made.choices[0].logprobs.content
        return answer.headers["x-appliance-model-version"], [t.token for t in found], [t.logprob for t in found]

    def make_starter(self, steps: int = 10) -> dict[str, Any]:
        """Import the small model `starter`, trained for ten steps only; return the operation."""
        made = self.ask("model", "import", str(starter_folder(steps)), "--name", "starter")
        assert made["state"] == "succeeded" and made["result"]["name"] == "starter", made
        return made

    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
        return {**clean, "APPLIANCE_DATA_DIR": str(self.data_dir), "COLUMNS": "200"}

    def up(self) -> str:
        told = self.run("up", "--detach", "--port", str(self.port))
        assert self.url in told and f"http://127.0.0.1:{self.port}/ui" in told
        if not self.key:
            assert "sk-appl-" not in told, "there is no terminal here: it may be a journal"
            file = self.data_dir / "first-key"
            assert str(file) in told and file.stat().st_mode & 0o777 == 0o600
            self.key = file.read_text().strip()
        return told

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **named: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=self.key, timeout=300, **{"max_retries": 0, **named})

    def http(self, **named: Any) -> httpx.Client:
        # Without `verify=False` each client reads all certificates of the machine, too slow for tests that poll.
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, verify=False, **{"timeout": 60, **named}
        )

    def get(self, path: str) -> Any:
        with self.http() as http:
            answer = http.get(path)
        assert answer.status_code < 400, answer.text
        return answer.json()

    def admin(self, path: str) -> Any:
        return self.get(f"/admin/v1/{path}")

    def job(self, job_id: str) -> Any:
        return self.get(f"/v1/fine_tuning/jobs/{job_id}")

    def tried(self, path: str) -> Any | None:
        """Like `admin`, but returns None if the box answers with an error, e.g. while a killed controller restarts."""
        with self.http() as http:
            answer = http.get(f"/admin/v1/{path}")
        return answer.json() if answer.status_code < 400 else None

    def answers(self) -> bool:
        try:
            with self.http(timeout=5) as http:
                return http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def set_mode(self, **mode: Any) -> None:
        """Like `mode set --wait`, without the start time of a command; returns when the devices have moved."""
        with self.http(timeout=310) as http:
            answer = http.put("/admin/v1/mode", json=mode, params={"wait": True, "timeout_s": 300})
        assert answer.status_code < 400, answer.text

    def upload(self, content: bytes, name: str = "train.jsonl") -> str:
        return self.client().files.create(file=(name, content), purpose="fine-tune").id

    def steps(self, job_id: str) -> list[dict[str, Any]]:
        """All steps of a job, from all pages."""
        rows: list[dict[str, Any]] = []
        while True:
            page = self.job(f"{job_id}/metrics?limit=10000&after_step={rows[-1]['step'] if rows else -1}")
            rows += page["data"]
            if not page["has_more"]:
                return rows

    def losses(self, job_id: str) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.steps(job_id) if row["loss"] is not None}

    def validation_losses(self, job_id: str) -> list[float]:
        return [row["valid_loss"] for row in self.steps(job_id) if row["valid_loss"] is not None]

    # --- processes and files

    def pids_logging_to(self, pattern: str) -> list[int]:
        """Processes with a log of this box as stdout whose name matches the glob `pattern`."""
        found = []
        for process in psutil.process_iter():
            try:
                target = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            except OSError:
                continue
            if target.parent == self.data_dir / "logs" and target.match(pattern):
                found.append(process.pid)
        return sorted(found)

    def pids_of(self, name: str) -> list[int]:
        """Pids of processes by their common name ("main", "controller", ...)."""
        if name == "main":
            return [self.main_pid()]
        if name in LOGS:
            return self.pids_logging_to(LOGS[name])
        titles = {pid: command.split(" ")[0] for pid, command in self.running().items()}
        return sorted(pid for pid, title in titles.items() if PROGRAMS[name] in title and title != "ray::IDLE")

    def main_pid(self) -> int:
        return json.loads((self.data_dir / "box.json").read_text())["pid"]

    def evict(self, kind_dir: str, model: str, version: str) -> None:
        """Remove a version from shared memory, like the store when it needs the memory."""
        root = Path(f"/dev/shm/appliance-{_box_id(self.data_dir)}")
        (found,) = root.rglob(f"{kind_dir}/{encode_name(model)}/{encode_name(version)}")
        shutil.rmtree(found)

    def left(self) -> list[str]:
        """Return the processes and files that this box did not remove."""
        shared = [str(path) for name in self._names() for path in Path("/dev/shm").glob(f"*{name}*")]
        running = [f"process {pid} {command[:120]}" for pid, command in self.running().items()]
        session = BoxPaths.of(self.data_dir).ray_logs
        return running + shared + ([str(session)] if session.exists() else [])

    def _names(self) -> tuple[str, str]:
        """Name parts of this box's files in shared memory: of the box, and of its engines."""
        engines = segment_prefix_of(BoxPaths.of(self.data_dir).replica_sockets / "x").partition(".")[0]
        return _box_id(self.data_dir), engines

    def note_segments(self) -> None:
        """Record shared-memory files of vLLM and torch that this box maps. Call it before the box or a part ends."""
        self._segments |= segments_of(self.running())

    def segments_left(self) -> set[str]:
        """Recorded segments that still exist but that no living process maps."""
        return {name for name in self._segments if Path(SHARED_MEMORY, name).exists()} - segments_of(psutil.pids())

    def running(self) -> dict[int, str]:
        """Command lines by pid of all processes except the main process, which carries no mark of its box."""
        box_id, found = _box_id(self.data_dir), {}
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("APPLIANCE_BOX") == box_id or self._is_of_ray(process)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def _is_of_ray(self, process: psutil.Process) -> bool:
        """Whether it is a Ray agent of this box, by its log files: its title overwrites its environment."""
        if not "".join(process.cmdline()[:1]).startswith("ray::"):
            return False
        logs = str(BoxPaths.of(self.data_dir).ray_logs)
        return any(file.path.startswith(logs) for file in process.open_files())

    def kill_controller(self) -> None:
        """Kill the controller; return when the next one answers."""
        (controller,) = [pid for pid, command in self.running().items() if "appliance.controller.main" in command]
        os.kill(controller, signal.SIGKILL)
        wait_for(lambda: self.tried("status"), "the next controller", 300)

    def destroy(self) -> None:
        subprocess.run([COMMAND, "down", "--force"], capture_output=True, env=self.environment(), timeout=60)
        box_id = _box_id(self.data_dir)
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(f"/dev/shm/appliance-{box_id}", ignore_errors=True)

    def listening(self) -> dict[str, str]:
        """Processes of this box that listen or receive datagrams: command line by address and port."""
        commands, found = self.running() | {self.main_pid(): "main"}, {}
        for pid, command in commands.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in psutil.Process(pid).net_connections("inet"):
                    if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr):
                        address = ipaddress.ip_address(one.laddr.ip)
                        address = getattr(address, "ipv4_mapped", None) or address
                        found[f"{address}:{one.laddr.port}"] = f"{pid} {command[:100]}"
        return found

    def open_to_others(self) -> dict[str, str]:
        """Modes of the box's files that other users could open, without appliance.toml and Ray's private folders."""
        found, paths = {}, BoxPaths.of(self.data_dir)
        rays = (paths.ray_session, paths.ray_logs)
        assert {place.parent.lstat().st_mode & 0o777 for place in rays} == {0o700}
        for root in (self.data_dir, paths.shm_root):
            for path in root.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # the file may vanish meanwhile
                    mode = path.lstat().st_mode
                    below_ray = any(path.is_relative_to(place) for place in rays)
                    if mode & 0o077 and not stat.S_ISLNK(mode) and path.name != "appliance.toml" and not below_ray:
                        found[str(path)] = oct(mode)
        return found


def answers_to_strangers(address: str, port: int) -> str:
    """Answers to a client without token and certificate, in clear and under TLS; "" if it is silent or refuses."""
    said = []
    for secure in (False, True):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5) as plain:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            one = context.wrap_socket(plain) if secure else plain
            one.settimeout(2)
            # The preface of HTTP/2 (gRPC): an open server answers with its settings.
            one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            said.append(one.recv(4096))
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5) as plain:
            one = context.wrap_socket(plain) if secure else plain
            one.settimeout(2)
            one.sendall(b"POST /get_runtime_envs_info HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            said.append(one.recv(4096))
    # A TLS alert, and statuses 401 and 400 of Ray's one HTTP server, its runtime environment agent.
    refusals = (b"\x15\x03", b"HTTP/1.1 401", b"HTTP/1.0 400")
    return " ".join(repr(answer) for answer in said if answer and not answer.startswith(refusals))


@contextmanager
def whole_box(data_dir: Path, settings: str = "") -> Iterator[WholeBox]:
    """A running box with `settings` as its appliance.toml; stopped at the end, when it must leave nothing behind."""
    one = WholeBox(data_dir)
    (data_dir / "appliance.toml").write_text(settings)
    try:
        one.up()
        yield one
        one.run("down")
        assert not (left := one.left()), left
        wait_for(lambda: not one.segments_left(), "segments without a process to be gone", 10)
    finally:
        one.destroy()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 120, pause_s: float = 0.25) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(pause_s)  # each check costs the box a request
    return found


def segments_of(pids: Iterable[int]) -> set[str]:
    """Shared-memory files of vLLM and torch that these processes map; their names do not tell the owner."""
    mapped = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        mapped |= {line.partition(SHARED_MEMORY)[2] for line in maps.splitlines() if SHARED_MEMORY in line}
    return {name for name in mapped if name.startswith(ENGINE_FILES)}


def _box_id(data_dir: Path) -> str:
    return BoxPaths.of(data_dir).box_id


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
