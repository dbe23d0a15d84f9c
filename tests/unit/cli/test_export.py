from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from appliance.cli import client as client_module
from appliance.cli.client import Client
from appliance.cli.errors import BadUsage
from appliance.store.objects import models
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import insert_model
from weights.tiers.directory import seal_dir

WHOLE = bytes(range(256)) * 40


def stored(box: ControlledBox, name: str, folder: Path) -> Path:
    """A version on disk of a base model."""
    folder.mkdir()
    save_file({"w": np.arange(3000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_dir(folder, kind="version", model=name, version="v1")

    def insert() -> None:
        insert_model(box.context.db, name)
        models.update_version(box.context.db, name, "v1", disk_path=str(folder))

    box.do(insert)
    return folder


def test_export_writes_the_files_of_the_version(box, tmp_path):
    folder, target = stored(box, "org/m", tmp_path / "v1"), tmp_path / "out" / "m"
    shown = box.json("model", "export", "org/m", "--to", str(target))
    assert shown["files"] == ["config.json", "model.safetensors"]
    assert load_file(target / "model.safetensors")["w"][-1] == 2999
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert box.run("model", "export", "org/m", "--to", str(target)).exit_code == BadUsage.exit_code


def test_export_of_a_damaged_file_leaves_nothing(box, tmp_path):
    folder, target = stored(box, "m", tmp_path / "v1"), tmp_path / "out"
    (folder / "config.json").write_text("[]")
    result = box.run("model", "export", "m", "--to", str(target))
    assert result.exit_code == 1 and "config.json" in result.stderr
    assert not target.exists() and not list(tmp_path.glob(".out*"))


@pytest.fixture
def flaky() -> Iterator[tuple[str, list[str | None]]]:
    """A server that sends at most 1,000 bytes before it closes the connection; and the ranges that it was asked for."""
    ranges: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            ranges.append(self.headers.get("range"))
            begin = int(ranges[-1].split("=")[1].rstrip("-")) if ranges[-1] else 0
            changed = self.path == "/changes" and begin
            self.send_response(200 if changed or not begin else 206)
            self.send_header("etag", '"b"' if changed else '"a"')
            self.send_header("content-length", str(len(WHOLE) - begin))
            self.end_headers()
            self.wfile.write(WHOLE[begin : begin + 1000])
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", ranges
        server.shutdown()


def test_client_parts_resumes_where_the_connection_broke(flaky, monkeypatch):
    url, ranges = flaky
    monkeypatch.setattr(client_module, "RESUME_AFTER_S", 0.0)
    assert b"".join(Client(url).parts("/whole")) == WHOLE
    assert ranges[:3] == [None, "bytes=1000-", "bytes=2000-"]


def test_client_parts_refuses_a_body_that_changed(flaky, monkeypatch):
    monkeypatch.setattr(client_module, "RESUME_AFTER_S", 0.0)
    with pytest.raises(BadUsage):
        list(Client(flaky[0]).parts("/changes"))
