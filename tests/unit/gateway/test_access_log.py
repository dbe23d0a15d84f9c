"""The access log: whatever a client sends, its lines are JSON."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.gateway.access.metrics import AccessLog
from appliance.gateway.access.request import Request


def test_names_that_people_gave_keys_stand_in_no_line(tmp_path: Path) -> None:
    """Who was forgotten stood there for as long as logs are kept, by each change of a key that was asked for so."""
    log, key = AccessLog(str(tmp_path / "access.log")), b"/admin/v1/keys/key_" + b"a1" * 12
    for path in (b"/admin/v1/keys/ann", b"/v1/keys/key_ann", key, b"/v1/files/keys"):
        log.add(Request(b"GET", path), 1.0)
    log.close()
    lines = [json.loads(line)["path"] for line in (tmp_path / "access.log").read_text().splitlines()]
    masked = ["/admin/v1/keys/*", "/v1/keys/*"]
    assert lines == [*masked, key.decode(), "/v1/files/keys"]


def test_log_file_is_private(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.log"))
    log.close()
    assert (tmp_path / "access.log").stat().st_mode & 0o777 == 0o600
