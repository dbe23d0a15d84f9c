"""A server of W&B's protocol, as far as its client 0.31 asks one: runs, their history, summary and end.

W&B's own server is no package and no test may ask the one on the net. What this answers was taken from what the client
asks for: three questions of GraphQL, and a stream of lines for each run, which it keeps at the places that the client
names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "box"
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class Run:
    """lines: of the history, as the client sent them. sent: how many it sent in all, also those that replaced one."""

    name: str
    project: str
    title: str = ""
    config: str = "{}"
    tags: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    summary: str = "{}"
    sent: int = 0
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


class WandbServer:
    """`runs` by name; `asked`: names of operations and paths, in order; `refused`: statuses of those it did not know.
    `key`: what a client has to show."""

    def __init__(self, key: str):
        self.key = key
        self.runs: dict[str, Run] = {}
        self.asked: list[str] = []
        self.unknown: list[str] = []
        self._lock = threading.Lock()

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        name, told = str(asked.get("operationName")), asked.get("variables") or {}
        self.asked.append(name)
        with self._lock:
            if name == "RunResumeStatus":
                run = self.runs.get(told["name"])
                return {"model": self._model(told["project"]) | {"bucket": run and self._resumed(run)}}
            if name == "UpsertBucket":
                fresh = told["name"] not in self.runs
                run = self.runs.setdefault(told["name"], Run(told["name"], told["project"]))
                run.title = told.get("displayName") or run.title
                run.config, run.tags = told.get("config") or run.config, told.get("tags") or run.tags
                return {"upsertBucket": {"bucket": self._bucket(run), "inserted": fresh}}
            if name == "CreateRunFiles":
                return {"createRunFiles": {"runID": told["run"], "uploadHeaders": [], "files": []}}
            if name == "Viewer":
                return {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}"}}
        self.unknown.append(name)
        return {}

    def stream(self, name: str, sent: dict[str, Any]) -> None:
        self.asked.append("file_stream")
        with self._lock:
            run = self.runs[name]
            for file, part in (sent.get("files") or {}).items():
                if file == HISTORY:
                    at, lines = int(part["offset"]), part["content"]
                    assert at <= len(run.lines), f"a hole in the history of {name}: {at} after {len(run.lines)} lines"
                    run.lines[at : at + len(lines)] = lines
                    run.sent += len(lines)
                elif file == SUMMARY:
                    run.summary = part["content"][-1]
            if sent.get("complete"):
                run.exit_code = int(sent["exitcode"])

    def _model(self, project: str) -> dict[str, Any]:
        return {"id": project, "name": project, "entity": {"id": ENTITY, "name": ENTITY}}

    def _bucket(self, run: Run) -> dict[str, Any]:
        return {
            "id": run.name,
            "name": run.name,
            "displayName": run.title,
            "description": None,
            "config": run.config,
            "sweepName": None,
            "project": self._model(run.project),
            "historyLineCount": len(run.lines),
        }

    def _resumed(self, run: Run) -> dict[str, Any]:
        return {
            "id": run.name,
            "name": run.name,
            "displayName": run.title,
            "summaryMetrics": run.summary,
            "logLineCount": 0,
            "historyLineCount": len(run.lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(run.lines[-1:]),
            "eventsTail": "[]",
            "config": run.config,
            "tags": run.tags,
            "notes": None,
            # Without this the client takes the run for one that never began, and tells all of it again.
            "wandbConfig": json.dumps({"t": json.loads(run.config).get("_wandb", {}).get("value", {}).get("t")}),
        }


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.startswith("/sdk/otel/"):  # the client's own metrics, which have no key
                self._answer(200, {})
            elif self.headers.get("authorization") != _basic(server.key):
                self._answer(401, {"errors": [{"message": "user is not logged in"}]})
            elif self.path == "/graphql":
                self._answer(200, {"data": server.graphql(json.loads(body))})
            elif (found := re.fullmatch(rf"/files/{ENTITY}/[^/]+/([^/]+)/file_stream", self.path)) is not None:
                server.stream(found[1], json.loads(body))
                self._answer(200, {"exitcode": None, "limits": {}})
            else:
                server.unknown.append(self.path)
                self._answer(404, {})

        def _answer(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"api:{key}".encode()).decode()


@contextlib.contextmanager
def wandb_server(port: int, key: str, server: WandbServer | None = None) -> Iterator[WandbServer]:
    """server: with what it kept from before, where it was away for a while."""
    one = server or WandbServer(key)
    listener = ThreadingHTTPServer(("127.0.0.1", port), _handler(one))
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
