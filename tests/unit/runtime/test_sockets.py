"""Unix sockets: whose they are from their first moment, whatever the umask, and that all are made in one place."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from runtime.sockets import bind_owner_only

ROOT = Path(__file__).parents[3]
BINDS = re.compile(
    r"(?:start|create)_unix_server\((?![^\n]*sock=)|socket\.AF_UNIX[^\n]*\n(?:[^\n]*\n){0,3}?[^\n]*\.bind\("
)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_socket_is_its_owners_alone_before_anybody_can_connect(tmp_path: Path, umask: int):
    """No other file that is made meanwhile gets its mode: the umask is the whole process's."""
    before = os.umask(umask)
    try:
        with bind_owner_only(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_no_file_of_ours_binds_a_unix_socket_on_its_own():
    found = []
    for package in ("appliance", "scheduler", "train", "serve", "weights", "runtime"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            if file.name not in ("sockets.py", "supervised_process.py") and (BINDS.search(text) or "os.umask(" in text):
                found.append(str(file))
    assert not found, "use runtime.sockets.bind_owner_only"
