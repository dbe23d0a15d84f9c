from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.alerts import SETTLE_S, Known, Message, Problem, Undelivered, channels, send, step
from appliance.config import AlertSettings
from appliance.controller import alerts
from appliance.store import jobs

DAY_S = 86_400.0
FULL = Problem("check:disk free", "disk free: 1 GB", "remove files")
FAILED = Problem("job:1", "job 1 failed", is_event=True)


class Timeline:
    """Calls `step` for successive looks at problems; every message counts as delivered."""

    def __init__(self) -> None:
        self.known: Known = {}

    def look(self, now_s: float, *problems: Problem) -> list[tuple[str, str]]:
        self.known, messages = step(problems, self.known, now_s, DAY_S)
        for message in messages:
            if message.id in self.known:
                self.known[message.id]["sent_s"] = now_s
        return [(message.event, message.id) for message in messages]


def test_step_lasting_problem_is_sent_daily_and_resolved():
    timeline = Timeline()
    assert timeline.look(0, FULL) == []
    assert timeline.look(SETTLE_S, FULL) == [("problem", FULL.id)]
    assert timeline.look(2 * SETTLE_S, FULL) == []
    assert timeline.look(SETTLE_S + DAY_S, FULL) == [("reminder", FULL.id)]
    assert timeline.look(2 * SETTLE_S + DAY_S - 1) == []
    assert timeline.look(2 * SETTLE_S + DAY_S) == [("resolved", FULL.id)]
    assert timeline.known == {}


def test_step_event_is_sent_once_immediately():
    timeline = Timeline()
    assert timeline.look(0, FAILED) == [("problem", FAILED.id)]
    assert timeline.look(2 * DAY_S, FAILED) == []
    assert timeline.look(3 * DAY_S) == []


@given(st.lists(st.tuples(st.floats(1, 2 * DAY_S), st.booleans()), max_size=30))
def test_step_resolves_only_sent_problems(looks):
    timeline, now_s, is_open = Timeline(), 0.0, False
    for pause_s, lasts in looks:
        now_s += pause_s
        for event, _ in timeline.look(now_s, *([FULL] if lasts else [])):
            assert (event == "problem") != is_open
            is_open = event != "resolved"


@contextlib.contextmanager
def http_server(status: int) -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", bodies
        server.shutdown()


@contextlib.contextmanager
def mail_server() -> Iterator[tuple[int, list[bytes]]]:
    """A server that accepts one mail (RFC 5321); yields its port and the received lines."""
    lines: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb", buffering=0) as wire:
            wire.write(b"220 here\r\n")
            while line := wire.readline():
                lines.append(line)
                command = line[:4].upper()
                if command == b"DATA":
                    wire.write(b"354 go on\r\n")
                    while lines[-1] != b".\r\n":
                        lines.append(wire.readline())
                wire.write(b"221 bye\r\n" if command == b"QUIT" else b"250 fine\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener], daemon=True)
        thread.start()
        yield listener.getsockname()[1], lines
        thread.join(5)


def test_send_posts_webhook_and_sends_mail():
    with http_server(200) as (url, bodies), mail_server() as (port, lines):
        settings = AlertSettings(webhook=url, email=["ops@example.org"], smtp_host="127.0.0.1", smtp_port=port)
        for channel in channels(settings):
            send(settings, channel, Message("problem", "a", "the disk is full", "remove files"), "box")
    assert json.loads(bodies[0])["event"] == "problem"
    mail = b"".join(lines)
    assert b"rcpt TO:<ops@example.org>" in mail and b"What to do: remove files" in mail and b"\nDate: " in mail


def test_problems_of_lists_faults_that_need_a_person():
    findings = [
        {"check": "disk free", "state": "fail", "found": "1 GB", "remedy": "remove files"},
        {"check": "certificate", "state": "warn", "found": "3 days left", "remedy": "renew it"},
        {"check": "disk sync", "state": "warn", "found": "20 ms", "remedy": "an SSD"},
        {"check": "device gpu1", "state": "warn", "found": "hot", "remedy": "cool it"},
    ]
    devices = [
        {"id": "gpu0", "lost": None, "cordon": None, "health_reason": ""},
        {"id": "gpu1", "lost": None, "cordon": "person", "health_reason": "drained by ann"},
        {"id": "gpu2", "lost": None, "cordon": "box", "health_reason": "Xid 79"},
        {"id": "gpu3", "lost": {"reason": "gone"}, "cordon": None, "health_reason": "gone"},
    ]
    status = {
        "troubles": [{"model": "c", "message": "its engine does not start"}],
        "replicas": [{"model": "a", "state": "open"}, {"model": "b", "state": "asleep"}],
    }
    found = [one.id for one in alerts.problems_of(findings, devices, status, {"a": 3, "b": 2}, [])]
    assert found == [
        *("check:disk free", "check:certificate", "device:gpu1"),
        *("device:gpu2", "device:gpu3", "model:b", "model:c"),
    ]


async def test_look_sends_failed_job_once_and_retries_undelivered(control):
    job_id = await control.job()
    jobs.set_phase(control.db, job_id, "failed", error={"code": "x", "message": "no memory"})
    jobs.set_phase(control.db, await control.job(), "failed", finished_s=10.0)  # failed too long ago to report
    with http_server(500) as (url, _), pytest.raises(Undelivered):
        await alerts.look(control.context, AlertSettings(webhook=url))
    with http_server(200) as (url, bodies):
        for _ in range(2):
            await alerts.look(control.context, AlertSettings(webhook=url))
    assert [json.loads(body)["id"] for body in bodies if b"job:" in body] == [f"job:{job_id}"]
