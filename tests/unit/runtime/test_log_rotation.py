"""Logs rotate under whoever writes them: no line lost, none twice, and no more on the disk than was allowed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime import log_rotation
from runtime.log_rotation import DAY_S, LogLimits, LogRotation, collapse

LIMITS = LogLimits(size=64 * 1024, keep=3, days=30.0, total=10**9)
# Writes numbered lines as fast as it can until its stdin ends; a line may be written in two pieces.
WRITER = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(log, b"line %d " % number)
    os.write(log, b"x" * 90 + b"\\n")
    if number % 500 == 0:
        print(number, flush=True)
        sys.stdin.readline()
"""


def folder_that_can_collapse(tmp_path: Path) -> Path:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(64 * 1024))
    with open(probe, "r+b") as handle:
        if not collapse(handle.fileno(), os.fstatvfs(handle.fileno()).f_bsize):
            pytest.skip("the file system of the tests cannot cut a file at its front")
    probe.unlink()
    return tmp_path


def everything(path: Path) -> bytes:
    """Oldest first."""
    numbers = sorted((int(other.suffix[1:]) for other in path.parent.glob(f"{path.name}.*")), reverse=True)
    return b"".join(path.with_name(f"{path.name}.{number}").read_bytes() for number in numbers) + path.read_bytes()


def lines(data: bytes) -> list[int]:
    return [int(line.split()[1]) for line in data.splitlines()]


def test_no_line_is_lost_or_doubled_under_a_writer_that_never_pauses(tmp_path: Path):
    path = folder_that_can_collapse(tmp_path) / "engine-r1.log"
    rotation = LogRotation(tmp_path, LogLimits(size=64 * 1024, keep=1000, days=30.0, total=10**9))
    written = 0
    # A busy machine may leave one writer time for a single rotation.
    while len(list(tmp_path.glob("*.log.*"))) < 3:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), "20000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        while writer.poll() is None:
            rotation.tend(time.time())
        written += 1
    assert lines(everything(path)) == list(range(20_000)) * written


@pytest.mark.parametrize("can_collapse", [True, False])
def test_the_oldest_go_and_the_newest_lines_stay(tmp_path: Path, can_collapse: bool, monkeypatch: pytest.MonkeyPatch):
    if can_collapse:
        folder_that_can_collapse(tmp_path)
    else:
        monkeypatch.setattr(log_rotation, "collapse", lambda *_: False)
    path, rotation = tmp_path / "controller.log", LogRotation(tmp_path, LIMITS)
    path.touch(0o600)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), "10000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stdin is not None
    for _ in range(20):
        writer.stdout.readline()  # it waits until it is told to go on
        rotation.tend(time.time())
        assert path.stat().st_size <= LIMITS.size and path.stat().st_ino
        writer.stdin.write("\n")
        writer.stdin.flush()
    writer.communicate()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "controller.log",
        "controller.log.1",
        "controller.log.2",
        "controller.log.3",
    ]
    assert all(p.stat().st_mode & 0o77 == 0 for p in tmp_path.iterdir())
    kept = everything(path).split(b"\n", 1)[1]  # the first may be the rest of one
    numbers = lines(kept)
    assert numbers == list(range(numbers[0], 10_000)) and len(kept) > 3 * 40_000


def test_short_ones_and_other_files_are_left_alone(tmp_path: Path):
    (tmp_path / "ray.log").write_bytes(b"x" * LIMITS.size)
    (tmp_path / "notes.txt").write_bytes(b"x" * 10 * LIMITS.size)
    (tmp_path / "elsewhere").write_bytes(b"x" * 10 * LIMITS.size)
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    before = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    LogRotation(tmp_path, LIMITS).tend(time.time())
    assert {p.name: p.stat().st_size for p in tmp_path.iterdir()} == before


def aged(path: Path, days: float, size: int = 10) -> Path:
    path.write_bytes(b"x" * size)
    os.utime(path, (time.time() - days * DAY_S,) * 2)
    return path


def test_the_old_go_unless_somebody_has_them_open(tmp_path: Path):
    gone = [aged(tmp_path / name, 31) for name in ("engine-r1.log", "access.log.2", "job-rank0.log")]
    left = [aged(tmp_path / name, 29) for name in ("engine-r2.log", "access.log.1")] + [aged(tmp_path / "a.json", 99)]
    held = aged(tmp_path / "warm-serve.log", 40)
    with open(held, "ab"):
        LogRotation(tmp_path, LIMITS).tend(time.time())
    assert not [path for path in gone if path.exists()]
    assert all(path.exists() for path in [*left, held])
    LogRotation(tmp_path, LIMITS).tend(time.time())
    assert not held.exists()


def test_past_the_total_the_oldest_go(tmp_path: Path):
    paths = [aged(tmp_path / f"job-{n}.log", 10 - n, 1000) for n in range(5)]
    with open(paths[0], "ab"):
        LogRotation(tmp_path, LogLimits(10_000, 3, 30.0, 3500)).tend(time.time())
    assert [path.exists() for path in paths] == [True, False, False, True, True]


def test_on_a_full_disk_old_lines_make_room_and_the_box_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "access.log"
    path.write_bytes(b"old\n" * 64 * 1024)
    (tmp_path / "access.log.1").write_bytes(b"older\n")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_rotation, "_copy", full)
    LogRotation(tmp_path, LIMITS).tend(time.time())
    assert [p.name for p in tmp_path.iterdir()] == ["access.log"] and path.stat().st_size <= LIMITS.size
    assert "the disk is full" in caplog.text
