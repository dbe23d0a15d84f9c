"""Where a box puts its files, and which permissions they have."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from appliance.boot import main
from appliance.config import BoxConfig
from appliance.paths import BoxPaths, UnsafeFolder
from appliance.store import keys
from appliance.store.database import Database


def test_shm_root_is_same_for_equal_data_directories(tmp_path):
    one, again = BoxPaths.of(tmp_path / "a"), BoxPaths.of(tmp_path / "b" / ".." / "a")
    other = BoxPaths.of(tmp_path / "b")
    assert one.shm_root == again.shm_root != other.shm_root
    assert one.box_id == one.shm_root.name.removeprefix("appliance-") and len(one.box_id) == 8


def test_socket_paths_of_deep_data_directory_fit_unix_limit():
    deep = BoxPaths.of(Path("/x" * 200))
    rays = deep.ray_session / "session_2026-11-23_07-54-22_383974_4194304" / "sockets" / "plasma_store"
    for socket in (
        deep.controller_socket,
        deep.gateway_socket,
        deep.bus_socket,
        deep.warm_serve_socket,
        deep.replica_sockets / f"{'r' * 40}.sock",
        rays,
    ):
        assert len(bytes(socket)) <= 107


def test_create_makes_private_folders_and_one_token(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    token = paths.ray_token.read_text()
    paths.create()
    assert paths.ray_token.read_text() == token and len(bytes.fromhex(token)) == 32
    assert os.stat(paths.ray_token).st_mode & 0o777 == 0o600
    for folder in (paths.data_dir, paths.shm_root, paths.run, paths.jobs):
        assert os.stat(folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("where", ["", "models", "shm"])
def test_create_rejects_folders_writable_or_owned_by_others(tmp_path, monkeypatch, where):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    folder = paths.shm_root if where == "shm" else paths.data_dir / where
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    if not where:
        paths.ray_token.write_text("known to another user")
    with pytest.raises(UnsafeFolder, match="mode 777.*chmod o-w"):
        paths.create()
    folder.chmod(0o775)
    paths.create()  # group write is allowed: the operator chooses the group
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFolder, match="belongs to user"):
        paths.create()


def test_main_creates_files_readable_only_by_owner(tmp_path, monkeypatch):
    async def fails(config, paths, state, show):
        (paths.logs / "ray.log").open("ab").close()  # the supervisor opens logs of child processes like this
        raise main.BoxError("no Ray")

    monkeypatch.setattr(main, "_run", fails)
    before = os.umask(0o022)
    try:
        config = BoxConfig.model_validate({"box": {"data_dir": str(tmp_path / "box")}})
        (tmp_path / "config.json").write_text(config.model_dump_json())
        assert main.main(["up", "--config", str(tmp_path / "config.json")]) == 1
    finally:
        os.umask(before)
        shutil.rmtree(BoxPaths.of(tmp_path / "box").shm_root)
    made = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "box").rglob("*") if path.is_file()}
    assert made.keys() >= {"box.lock", "ray.log", "box.json"} and set(made.values()) == {0o600}


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_start_with_unwritable_box_json_fails(tmp_path, mode):
    """Without box.json no command finds the box, and `up --detach` waits forever."""
    config = BoxConfig.model_validate({"box": {"data_dir": str(tmp_path / "box")}})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "box" / "box.json").mkdir(parents=True)  # a directory here prevents the box from writing its file
    (tmp_path / "box").chmod(mode)
    before = os.umask(0o022)
    try:
        assert main.main(["up", "--config", str(tmp_path / "config.json")]) == 1
    finally:
        os.umask(before)
        shutil.rmtree(BoxPaths.of(tmp_path / "box").shm_root, ignore_errors=True)


class SlowBox:
    """A box whose start ends only when the stop signal cancels it."""

    hopeless = ""

    def __init__(self, config, paths, state, stop):
        self.stop = stop

    async def start(self):
        self.stop()
        await asyncio.Event().wait()

    async def end(self):
        return ""


async def test_run_stopped_during_start_returns_130(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "Box", SlowBox)
    paths = BoxPaths.of(tmp_path / "box", shm_mount=tmp_path)
    paths.create()
    assert await main._run(BoxConfig(), paths, main.BoxState(paths.state_file), None) == 130


def test_make_first_key_replaces_symlink_by_private_file(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    paths.first_key.symlink_to(tmp_path / "elsewhere")
    assert main.make_first_key(paths) is True
    with Database(paths.database) as db:
        (row,) = keys.list_all(db, "revoked_s IS NULL")
        assert keys.fingerprint(paths.first_key.read_text().strip()) == row.sha256 and "admin" in row.scopes
    assert not (tmp_path / "elsewhere").exists() and not paths.first_key.is_symlink()
    assert os.stat(paths.first_key).st_mode & 0o777 == 0o600
    assert main.make_first_key(paths) is False
