"""`up` says "ready" of this box only: its port is looked at before anything starts, its gateway is known by name."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading

import pytest

from appliance.boot import endpoint, ray_head
from appliance.boot.box_state import BoxState
from appliance.boot.main import Box, BoxError
from appliance.config import BoxConfig
from appliance.paths import BoxPaths


@pytest.fixture
def foreign():
    """The gateway of another box: it answers /health with 200 on a port that it shares with whoever asks for that."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"status": "ok", "boot": "another"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Shared(http.server.ThreadingHTTPServer):
        allow_reuse_port = True

    server = Shared(("127.0.0.1", 0), Health, bind_and_activate=False)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.server_bind()
    server.server_activate()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def box(tmp_path, foreign, monkeypatch):
    """A box on the port of the other one; what Ray and the controller would do is not done."""
    paths = BoxPaths.of(tmp_path / "box", tmp_path)
    paths.create()
    settings = {"data_dir": str(paths.data_dir), "port": foreign, "start_timeout_s": 30}
    config = BoxConfig.model_validate({"box": settings})
    one = Box(config, paths, BoxState(paths.state_file))

    async def no_ray():
        raise ray_head.RayStartError("Ray was started")

    monkeypatch.setattr(one, "_ray", type("NoRay", (), {"begin": staticmethod(no_ray)})())
    return one


async def test_a_port_that_is_taken_is_said_before_anything_starts(box, foreign):
    with pytest.raises(BoxError, match=rf"port {foreign} of '127.0.0.1' .*by PID {os.getpid()}.*--port"):
        await box.start()


def test_what_cannot_be_listened_on_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert endpoint.why_not("127.0.0.1", port) == ""
    assert endpoint.why_not("localhost", port) == ""
    assert "--host" in endpoint.why_not("192.0.2.1", port)
    assert "nobody.invalid" in endpoint.why_not("nobody.invalid", port)
