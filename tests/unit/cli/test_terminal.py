"""What only a terminal gets: progress, a screen that refreshes, a conversation."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import output
from tests.unit.cli.test_chat import CHAT, sse

COMMAND = [sys.executable, "-m", "appliance.cli.main"]


class Terminal:
    """The far end of a pseudo-terminal, with everything written to it."""

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
            except OSError:  # the last process on the other side is gone
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


def test_progress_is_for_terminals_and_never_part_of_the_result(prepared, terminal):
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


def test_a_watch_refreshes_in_place_and_ends_with_ctrl_c(prepared, terminal):
    def devices(name: str) -> tuple[int, Any]:
        device = {"id": "n0/0", "kind": "cpu", "name": name, "memory_bytes": 1, "health": "ok", "holder": None}
        return 200, {"data": [device]}

    prepared.prepare("GET", "/admin/v1/devices", devices("first"), devices("second"))
    command = [*COMMAND, "gpu", "list", "--watch", "--every", "0.1", "--url", prepared.url]
    with subprocess.Popen(command, stdout=terminal.theirs, stderr=subprocess.PIPE) as watching:
        terminal.expect("first")
        terminal.expect("second")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
        assert watching.stderr.read() == b""
    terminal.expect("\x1b[?1049l")  # the screen from before is back


def test_a_conversation_keeps_its_history(prepared, terminal):
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


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (output.size, 999, "999 B"),
        (output.size, 1_234_567, "1.2 MB"),
        (output.size, None, "-"),
        (output.duration, 0.0123, "12 ms"),
        (output.duration, 61, "1 min 01 s"),
        (output.duration, 1e6, "11 d 13 h"),
        (output.count, 1234, "1,234"),
        (output.count, 7.2e9, "7.2 B"),
        (output.number, 12345.6, "12,346"),
        (output.label, "tokens_per_s", "tokens/s"),
        (output.printable, "a\x1b[2J\tb\r\n\u202e", "a[2J\tb\n"),
    ],
)
def test_numbers_as_people_read_them(function, value, text):
    assert function(value) == text


def test_ids_are_folded_on_a_narrow_terminal_never_shortened(tmp_path: Path, terminal):
    rows = "[('ftjob-' + 'a' * 60, 'y' * 60)]"
    program = f"from appliance.cli import output; output.draw(output.table(('ID', 'X'), {rows}, empty=''))"
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdout=terminal.theirs, env=environment, check=True)
    terminal.expect("y")
    assert terminal.text.count("a") == 60 and terminal.text.count("y") == 60 and "…" not in terminal.text


def test_json_holds_no_controls_either(capsys):
    """`-o json` on a terminal: U+009B begins a command to it, as ESC [ does, and JSON may have it as it stands."""
    hostile = {"filename\x85": "a\x9b2Jb\x7f\x1b", "name": "é漢"}
    output.print_json(hostile)
    told = capsys.readouterr().out
    assert json.loads(told) == hostile and "é漢" in told
    assert not [sign for sign in told if unicodedata.category(sign) == "Cc" and sign != "\n"]


def test_off_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("appliance.cli.output.LINE_EVERY_S", 0.0)
    with output.progress("import") as meter:
        meter("import: downloading", 30, 60)
    assert ", 50 %, after" in capsys.readouterr().err
    monkeypatch.setattr("appliance.cli.output.LINE_EVERY_S", 30.0)
    with output.progress("import") as meter:
        meter("import: downloading", 30, 60)
    assert capsys.readouterr().err == ""
