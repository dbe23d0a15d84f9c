"""The command as a process: output for terminals only, Ctrl-C, and the imports of `--help`."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli import conftest
from tests.unit.cli.test_chat import CHAT, sse

COMMAND = [sys.executable, "-m", "appliance.cli.main"]
no_environment, prepared = conftest.no_environment, conftest.prepared


class Terminal:
    """The controlling end of a pseudo-terminal, with all output written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.text = ""
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str, timeout_s: float = 20) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.text, timeout_s), self.text

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join(10)
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:  # the last process at the other end has exited
                return
            with self._grown:
                self.text += piece.decode(errors="replace")
                self._grown.notify_all()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def operation(state: str, done: float) -> dict[str, Any]:
    return {
        "operation": {
            "id": "op_1",
            "kind": "import",
            "state": state,
            "error": None,
            "result": {"name": "starter", "bytes": 1000},
            "progress": {"done": done, "total": 60, "unit": "files", "message": "downloading"},
        }
    }


def test_progress_is_shown_only_on_terminals(prepared, terminal):
    command = [*COMMAND, "model", "import", "hub/m", "--url", prepared.url, "-o", "json"]
    for stderr in (terminal.theirs, subprocess.PIPE):
        prepared.prepare("POST", "/admin/v1/models/import", (202, operation("running", 0)))
        prepared.prepare(
            "GET", "/admin/v1/operations/op_1", (200, operation("running", 30)), (200, operation("succeeded", 60))
        )
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True, timeout=30)
        assert json.loads(done.stdout)["state"] == "succeeded" and done.stdout.count("\n") == 1
        assert not done.stderr
    terminal.expect("import: downloading")


def test_watch_refreshes_in_place_and_ends_with_ctrl_c(prepared, terminal):
    def devices(name: str) -> tuple[int, Any]:
        device = {"id": "n0/0", "kind": "cpu", "name": name, "memory_bytes": 1, "health": "ok", "holder": None}
        return 200, {"data": [device]}

    prepared.prepare("GET", "/admin/v1/devices", devices("first"), devices("second"))
    command = [*COMMAND, "gpu", "list", "--watch", "--url", prepared.url]
    with subprocess.Popen(command, stdout=terminal.theirs, stderr=subprocess.PIPE) as watching:
        terminal.expect("first")
        terminal.expect("second")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
        assert watching.stderr.read() == b""
    terminal.expect("\x1b[?1049l")  # the previous screen is restored


def test_chat_keeps_history(prepared, terminal):
    prepared.prepare("POST", CHAT, (200, sse("Hello!")), (200, sse("Fine.")))
    with subprocess.Popen(
        [*COMMAND, "chat", "starter", "--url", prepared.url],
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
    ) as talking:
        terminal.expect("> ")
        terminal.type("Hi\n")
        terminal.expect("Hello!")
        terminal.type("And you?\n")
        terminal.expect("Fine.")
        terminal.type("\n")
        assert talking.wait(60) == 0
    assert json.loads(prepared.requests[1]["content"])["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And you?"},
    ]


def test_ids_wrap_on_narrow_terminal(tmp_path: Path, terminal):
    rows = "[('ftjob-' + 'a' * 60, 'y' * 60)]"
    program = f"from appliance.cli import output; output.draw(output.table(('ID', 'X'), {rows}, empty=''))"
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdout=terminal.theirs, env=environment, check=True)
    terminal.expect("y")
    assert terminal.text.count("a") == 60 and terminal.text.count("y") == 60 and "…" not in terminal.text


def test_ctrl_c_ends_follow_command_cleanly(prepared):
    prepared.prepare("GET", "/v1/fine_tuning/jobs/ftjob-1", (200, {"id": "ftjob-1", "status": "running"}))
    event = {"id": "e1", "type": "message", "level": "info", "message": "hello", "created_at": 0, "data": {}}
    prepared.prepare("GET", "/v1/fine_tuning/jobs/ftjob-1/events", (200, {"data": [event], "has_more": False}))
    command = [*COMMAND, "job", "logs", "-f", "ftjob-1", "--url", prepared.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert "hello" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
        assert following.stderr.read() == ""


HEAVY = ("torch", "vllm", "ray", "openai", "fastapi", "deepspeed", "transformers", "numpy", "pydantic", "rich", "httpx")


def test_help_imports_no_heavy_module():
    program = (
        "import sys\nfrom appliance.cli.main import run\n"
        "try: run()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, "job", "submit", "-h"], capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "appliance.cli.main" in loaded
    assert not loaded.intersection(HEAVY) and "appliance.config" not in loaded
