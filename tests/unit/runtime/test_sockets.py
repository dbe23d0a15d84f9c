"""Sockets are for their owner alone from the first moment, and making one changes nothing for other threads."""

import os
import stat

import pytest

from runtime.network import private_socket


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_socket_is_its_owners_alone_whatever_the_umask(tmp_path, open_umask):
    with private_socket(tmp_path / "s") as made:
        made.listen()
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_a_path_that_is_taken_is_an_error_and_leaves_nothing_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with private_socket(tmp_path / "s"):
        with pytest.raises(OSError):
            private_socket(tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) == before
