"""Sockets are for their owner alone from the first moment, and making one changes nothing for other threads."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from runtime.network.sockets import private_socket


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_socket_is_its_owners_alone_whatever_the_umask(tmp_path, open_umask):
    with private_socket(tmp_path / "s") as made:
        made.listen()
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_folders_made_meanwhile_can_be_entered(tmp_path):
    """A umask for the time of a bind was every thread's: half of the folders that another made were closed to all."""
    done = threading.Event()

    def make_sockets() -> None:
        while not done.is_set():
            private_socket(tmp_path / "s").close()
            os.unlink(tmp_path / "s")

    maker = threading.Thread(target=make_sockets)
    maker.start()
    try:
        for number in range(200):
            folder = tmp_path / str(number)
            folder.mkdir(mode=0o700)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        done.set()
        maker.join()


def test_a_path_that_is_taken_is_an_error_and_leaves_nothing_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with private_socket(tmp_path / "s"):
        with pytest.raises(OSError):
            private_socket(tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) == before


ROOT = Path(__file__).parents[3]
BOUND_ELSEWHERE = re.compile(
    r"(?:start|create)_unix_server\((?![^)]*sock=)|socket\.AF_UNIX[^\n]*\n(?:[^\n]*\n){0,3}?[^\n]*\.bind\("
)


def test_no_other_file_of_ours_binds_one():
    packages = ("appliance", "scheduler", "train", "serve", "weights", "runtime")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py") if file.name != "sockets.py"]
    assert len(files) > 300
    assert not [file for file in files if BOUND_ELSEWHERE.search(file.read_text())], "use private_socket"
