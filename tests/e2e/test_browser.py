"""A page of another origin, in a real browser (Debian's chromium), chats with the box and streams from it."""

from __future__ import annotations

import http.server
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import page_pictures
from tests.front.box import MODEL, Front, running_front

CHROMIUM = page_pictures.BROWSER
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser here (Debian: apt-get install chromium-headless-shell)"
)

PAGE = """<!doctype html><title>a page elsewhere</title><script>
const [url, key, model] = %s;
const headers = {"authorization": "Bearer " + key, "content-type": "application/json", "x-stainless-lang": "js"};
const ask = (path, more) => fetch(url + path, {method: "POST", headers, body: JSON.stringify(
    {model, messages: [{role: "user", content: "hi"}], ...more})});
async function tried() {
    const told = {};
    const chat = await ask("/v1/chat/completions", {});
    told.chat = (await chat.json()).choices[0].message.content;
    told.request = chat.headers.get("x-request-id");
    const stream = await ask("/v1/chat/completions", {stream: true});
    const reader = stream.body.pipeThrough(new TextDecoderStream()).getReader();
    told.stream = "";
    for (let part; !(part = await reader.read()).done;) told.stream += part.value;
    const refused = await ask("/v1/chat/completions", {model: "nosuch"});
    told.refused = [refused.status, (await refused.json()).error.code];
    const unknown = await ask("/v1/nowhere", {});
    told.unknown = [unknown.status, (await unknown.json()).error.code];
    const models = await fetch(url + "/v1/models", {headers});
    told.models = (await models.json()).data.map(one => one.id);
    return told;
}
const tell = told => fetch("/told", {method: "POST", body: JSON.stringify(told)});
tried().catch(error => ({failed: error.name})).then(tell);
</script>"""


class Site(http.server.ThreadingHTTPServer):
    """Serves one page, and gets from it what it has seen."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Visit)
        self.page = b""
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()


class Visit(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.answer(self.server.page if self.path == "/" else b"")

    def do_POST(self) -> None:
        self.server.told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def front(site: Site) -> Iterator[Front]:
    with running_front(imports=False, cors_origins=[f"http://127.0.0.1:{site.server_port}"]) as running:
        site.page = (PAGE % json.dumps([running.url, running.key, MODEL])).encode()
        yield running


def seen_by(site: Site, host: str) -> dict[str, Any]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ]
        # The page stays open until it has told what it saw.
        browser = subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-port=0", f"http://{host}:{site.server_port}/"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return site.told.get(timeout=60)
        finally:
            os.killpg(browser.pid, signal.SIGTERM)  # Debian's command is a script, which would die alone
            browser.wait(20)


def test_a_page_that_is_named_chats_streams_and_reads_errors(site: Site, front: Front) -> None:
    told = seen_by(site, "127.0.0.1")
    assert told["chat"] and told["request"].startswith("req_"), told
    assert told["stream"].startswith("data: {") and told["stream"].endswith("data: [DONE]\n\n")
    assert told["refused"] == [404, "model_not_found"] and told["unknown"] == [404, "unknown_url"]
    assert told["models"] == [MODEL]


def test_another_page_reads_nothing(site: Site, front: Front) -> None:
    assert seen_by(site, "localhost") == {"failed": "TypeError"}
