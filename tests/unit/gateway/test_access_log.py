"""The access log: whatever a client sends, its lines are JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

from appliance.gateway.access.request import Request
from appliance.gateway.observe.metrics import AccessLog


def test_any_path_and_any_method_make_a_line(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.log"))
    paths = [b'/v1/"},{"status":200,"x":"', b"/\xff\xfe\\", b"/" + b"a" * 9000]
    for path in paths * 2:
        request = Request(b"GET", path)
        request.request_id, request.status, request.received_s = b"req_1", 404, time.monotonic()
        request.trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
        log.add(request, time.monotonic())
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert [line["path"] for line in lines[:3]] == [path[:256].decode("latin-1") for path in paths]
    assert {line["trace_id"] for line in lines} == {"a" * 32}
    assert all(line["model"] is None and line["key_id"] is None and line["ttft_s"] is None for line in lines)


def test_names_that_people_gave_keys_stand_in_no_line(tmp_path: Path) -> None:
    """Who was forgotten stood there for as long as logs are kept, by each change of a key that was asked for so."""
    log, key = AccessLog(str(tmp_path / "access.log")), b"/admin/v1/keys/key_" + b"a1" * 12
    for path in (b"/admin/v1/keys/ann", b"/v1/keys/key_ann", key, b"/v1/files/keys"):
        log.add(Request(b"GET", path), 1.0)
    log.close()
    lines = [json.loads(line)["path"] for line in (tmp_path / "access.log").read_text().splitlines()]
    masked = ["/admin/v1/keys/*", "/v1/keys/*"]
    assert lines == [*masked, key.decode(), "/v1/files/keys"]


def test_log_on_a_full_disk_drops_lines_and_raises_nothing() -> None:
    log = AccessLog("/dev/full")
    for _ in range(3):
        log.add(Request(b"GET", b"/"), 1.0)
    log.close()


def test_log_file_is_private(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.log"))
    log.close()
    assert (tmp_path / "access.log").stat().st_mode & 0o777 == 0o600
