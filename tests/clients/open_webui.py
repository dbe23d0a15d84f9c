"""https://docs.openwebui.com/getting-started/: `open-webui serve` with OPENAI_API_BASE_URL and OPENAI_API_KEY.

Uses the routes of its page: lists the models of the connection and sends a chat request to one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

from report import BASE_URL, KEY, MODEL, QUESTION, tried

with socket.create_server(("127.0.0.1", 0)) as probe:
    PORT = probe.getsockname()[1]
ENVIRONMENT = os.environ | {
    "OPENAI_API_BASE_URL": BASE_URL,
    "OPENAI_API_KEY": KEY,
    "WEBUI_AUTH": "False",
    "ENABLE_OLLAMA_API": "False",
    "DATA_DIR": tempfile.mkdtemp(),
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
}


def call(path, body=None, token=""):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def running():
    log = tempfile.TemporaryFile("w+")
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    page = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 200
        while True:
            try:
                call("/health")
                break
            except OSError:
                if page.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(log.read()[-600:]) from None
                time.sleep(1)
        yield
    finally:
        os.killpg(page.pid, signal.SIGTERM)
        page.wait(30)


def chats():
    with running():
        token = json.loads(call("/api/v1/auths/signin", {"email": "admin@localhost", "password": "admin"}))["token"]
        assert MODEL in [model["id"] for model in json.loads(call("/api/models", token=token))["data"]]
        body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        told["plain"] = json.loads(call("/api/chat/completions", body | {"stream": False}, token))
        told["stream"] = call("/api/chat/completions", body | {"stream": True}, token)


told = {}


def plain():
    chats()
    assert told["plain"]["choices"][0]["message"]["content"]


def stream():
    assert told["stream"].rstrip().endswith("data: [DONE]")


tried(plain, stream)
