"""Log lines as real processes write them."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from runtime.errors import ChildDied
from runtime.processes.child import Child

from .test_warm_parent import ENTRY, warm  # noqa: F401 - a fixture

WRITES = """
import logging, sys
from runtime.logs import REQUEST_ID, configure_logging
theirs = logging.getLogger("library")
theirs.addHandler(logging.StreamHandler(sys.stdout))
theirs.propagate = False
configure_logging("controller", node="n0")
log = logging.getLogger("a.b")
log.debug("left out")
log.info("%d of\\nmany", 3, extra={"job_id": "j1", "device": "n0/0", "model": "", "colour": "red"})
REQUEST_ID.set("req_1")
theirs.warning("a library says")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("gone wrong")
"""


def written() -> list[dict]:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (0, "")
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_log_line_is_json_with_context_ids():
    first, library, wrong = written()
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "info",
        "process": "controller",
        "event": "3 of\nmany",
        "logger": "a.b",
        "node": "n0",
        "job_id": "j1",
        "device": "n0/0",
    }
    assert (library["event"], library["level"], library["request_id"]) == ("a library says", "warning", "req_1")
    assert wrong["level"] == "error" and "ZeroDivisionError" in wrong["exception"]


async def test_forked_process_logs_its_error_as_json_line(warm, tmp_path):  # noqa: F811
    child = await Child.spawn(warm, f"{ENTRY}:crash", {}, log_path=tmp_path / "child.log", name="child")
    await child.closed()
    (line,) = map(json.loads, (tmp_path / "child.log").read_text().splitlines())
    assert line["process"] == "child" and line["event"] == "child ends with an error"
    assert "RuntimeError: boom at start" in line["exception"]
    with pytest.raises(ChildDied, match="RuntimeError: boom at start"):
        await child.call("echo")
    parent = [json.loads(text) for text in (Path(warm).parent / "warm.log").read_text().splitlines()]
    assert {text["process"] for text in parent} == {"warm parent"}
