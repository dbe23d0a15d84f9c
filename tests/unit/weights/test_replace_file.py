"""Atomic replacement of files: no reader sees a partial file, and a full disk keeps the old one."""

import os
import stat

import pytest

from weights.format.names import replace_file


@pytest.mark.parametrize("durable", [False, True])
def test_replace_file_leaves_one_owner_only_file(tmp_path, durable):
    path = tmp_path / "box.json"
    for content in (b"old", b"new"):
        replace_file(path, content, durable=durable)
        assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_replace_file_on_full_disk_keeps_old_file(tmp_path, monkeypatch):
    path = tmp_path / "box.json"
    replace_file(path, b"old")

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_replace_file_temporary_name_is_hidden_with_prefix(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(os, "rename", lambda temporary, path: left.append(temporary.name))
    for name in (".incoming-1", "open"):
        replace_file(tmp_path / name, b"x")
    assert left[0].startswith(".incoming-1.") and left[1].startswith(".open.")
