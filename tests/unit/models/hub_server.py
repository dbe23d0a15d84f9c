"""A hub on loopback with the part of the Hugging Face protocol that downloads use.

Listing with checksums, HEAD with X-Repo-Commit/ETag/X-Linked-Etag, GET. It can misbehave on purpose.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors",)


@dataclass
class Hub:
    """A hub with one repository of `files`; `requests` records (method, path) of each request."""

    repository: str
    files: dict[str, bytes]
    gated: bool = False
    lies: dict[str, bytes] = field(default_factory=dict)
    """File -> wrong bytes of the same length, which the hub sends instead of the content."""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def listing(self) -> dict:
        return {
            "id": self.repository,
            "modelId": self.repository,
            "sha": COMMIT,
            "tags": [],
            "downloads": 0,
            "siblings": [self._sibling(name, data) for name, data in self.files.items()],
        }

    def _sibling(self, name: str, data: bytes) -> dict:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        described = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith(LARGE):
            described["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return described

    def etag(self, name: str) -> str:
        sibling = self._sibling(name, self.files[name])
        return sibling["lfs"]["sha256"] if "lfs" in sibling else sibling["blobId"]


class Server:
    """A server for `with Server(hub) as endpoint:`, which stops at the end of the block."""

    def __init__(self, hub: Hub):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            return

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if hub.gated:
                return self._json(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            api = f"/api/models/{hub.repository}"
            if path == api or path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                return self._json(200, hub.listing())
            if path.startswith(f"{api}/revision/"):
                return self._json(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            resolve = f"/{hub.repository}/resolve/{COMMIT}/"
            name = path.removeprefix(resolve)
            if not path.startswith(resolve) or name not in hub.files:
                return self._json(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
            self._file(name, body=body)

        def _file(self, name: str, *, body: bool) -> None:
            data = hub.lies.get(name, hub.files[name])
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hub.etag(name)}"')
            if name.endswith(LARGE):
                self.send_header("X-Linked-Etag", f'"{hub.etag(name)}"')
                self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def _json(self, status: int, content: dict, headers: dict[str, str] | None = None) -> None:
            raw = json.dumps(content).encode()
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

    return Handler
