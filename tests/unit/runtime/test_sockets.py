"""Sockets are private from their creation, without a change of the process-wide umask."""

import os
import stat

import pytest

from runtime.network import private_socket


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_private_socket_is_owner_only_under_any_umask(tmp_path, open_umask):
    with private_socket(tmp_path / "s") as made:
        made.listen()
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_private_socket_on_taken_path_raises_and_closes(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with private_socket(tmp_path / "s"):
        with pytest.raises(OSError):
            private_socket(tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) == before
