"""Somebody with a key who wants more than it is for: raw sockets, two owners, a neighbour who is watched."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.front.box import MODEL, Front
from tests.front.clients import CHAT

MARK = "what-only-anns-own-keys-may-see"
READ_S = 3.0


@dataclass
class Tally:
    """Of one class of attacks. `through`: a sentence for each that got through; `answers`: statuses."""

    name: str
    tried: int = 0
    through: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def got_through(self, what: str) -> None:
        self.through.append(what[:300])

    def saw(self, status: int) -> int:
        self.tried += 1
        self.answers[status] += 1
        return status


class Neighbour(threading.Thread):
    """An honest client beside the attack: one small question after the other, the slowest of which counts."""

    def __init__(self, front: Front, key: str):
        super().__init__(name="neighbour", daemon=True)
        self._front, self._key = front, key
        self._over = threading.Event()
        self.slowest_s, self.asked = 0.0, 0
        self.failed: list[str] = []

    def run(self) -> None:
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        with self._front.http(self._key) as http:
            while not self._over.wait(0.01):
                began_s = time.monotonic()
                answer = http.post(CHAT, json=ask)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                self.asked += 1
                if answer.status_code != 200:
                    self.failed.append(answer.text[:200])

    def __enter__(self) -> Neighbour:
        self.start()
        while not self.asked:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class Attacked:
    """A front with people on it: ann and ben, each with keys, and an administrator."""

    def __init__(self, front: Front):
        self.front = front
        self._numbers = iter(range(1_000_000))
        self.quiet_s = 0.0  # the slowest answer to a neighbour while nobody attacks
        self.honest = self.key(["inference"], owner="honest")

    def key(self, scopes: list[str], owner: str = "ann", **limits: Any) -> str:
        """A new key of this owner."""
        return self.made_key(scopes, owner, **limits)["key"]

    def made_key(self, scopes: list[str], owner: str = "ann", **limits: Any) -> dict[str, Any]:
        given = {"name": f"{owner}-{next(self._numbers)}", "scopes": scopes, "owner": owner, **limits}
        with self.front.http() as http:
            made = http.post("/admin/v1/keys", json=given)
        assert made.status_code == 200, made.text
        return made.json()

    def key_names(self) -> set[str]:
        with self.front.http() as http:
            return {key["name"] for key in http.get("/admin/v1/keys").raise_for_status().json()["data"]}

    @contextlib.contextmanager
    def raw(self, timeout_s: float = READ_S) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.front.port), timeout=timeout_s) as wire:
            yield wire

    def send(self, *pieces: bytes, half_close: bool = False, timeout_s: float = READ_S) -> bytes:
        """What came back for these bytes until the other side had nothing more to say."""
        came = b""
        with contextlib.suppress(OSError), self.raw(timeout_s) as wire:
            for piece in pieces:
                wire.sendall(piece)
            if half_close:
                wire.shutdown(socket.SHUT_WR)
            while data := wire.recv(1 << 16):
                came += data
        return came


def statuses(came: bytes) -> list[int]:
    """Of every answer in what came over one connection."""
    return [int(line[9:12]) for line in came.split(b"\r\n") if line.startswith(b"HTTP/1.1 ") and line[9:12].isdigit()]


def head(method: str, path: str, key: str, *lines: str) -> bytes:
    fields = (f"{method} {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {key}", *lines)
    return ("\r\n".join(fields) + "\r\n\r\n").encode("latin-1")


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def what_ann_has(front: Front, ann: str) -> dict[str, list[str]]:
    """One of each thing that a client can make, by the name of the path parameter that names it. `MARK` stands in what
    can be read of them."""
    lines = "\n".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{MARK} {n}"},
                    {"role": "assistant", "content": "yes"},
                ]
            }
        )
        for n in range(12)
    )
    request = {
        "custom_id": "1",
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": [{"role": "user", "content": MARK}]},
    }
    with front.http(ann) as http:

        def file_of(content: str, purpose: str) -> str:
            given = {"file": (f"{MARK}.jsonl", content.encode())}
            return http.post("/v1/files", files=given, data={"purpose": purpose}).raise_for_status().json()["id"]

        def made(path: str, given: dict[str, Any]) -> dict[str, Any]:
            return http.post(path, json=given).raise_for_status().json()

        training, work = file_of(lines, "fine-tune"), file_of(json.dumps(request), "batch")
        batch = made(
            "/v1/batches",
            {"input_file_id": work, "endpoint": CHAT, "completion_window": "24h", "metadata": {"of": MARK}},
        )
        upload = made(
            "/v1/uploads",
            {"purpose": "fine-tune", "filename": f"{MARK}.jsonl", "bytes": 64, "mime_type": "application/jsonl"},
        )
        job = made(
            "/v1/fine_tuning/jobs",
            {"model": MODEL, "training_file": training, "suffix": "mark", "metadata": {"of": MARK}},
        )
        response = made("/v1/responses", {"model": MODEL, "input": MARK, "background": True, "store": True})
    return {
        "file_id": [training, work],
        "batch_id": [batch["id"]],
        "upload_id": [upload["id"]],
        "job_id": [job["id"]],
        "response_id": [response["id"]],
    }


def every_route(front: Front) -> list[tuple[str, str]]:
    """Method and path template of all that the controller serves."""
    from appliance.controller.app import create_app

    document = front.call(lambda: create_app(front.context).openapi())  # type: ignore[arg-type]
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


def json_of(answer: httpx.Response) -> dict[str, Any]:
    """Of an error, what OpenAI's clients expect; fails for anything else."""
    told = answer.json()
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}, answer.text[:300]
    return told["error"]
