"""Where a box keeps what."""

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


def test_the_same_data_directory_always_has_the_same_shared_memory_root(tmp_path):
    one, again = BoxPaths.of(tmp_path / "a"), BoxPaths.of(tmp_path / "b" / ".." / "a")
    other = BoxPaths.of(tmp_path / "b")
    assert one.shm_root == again.shm_root != other.shm_root
    assert one.box_id == one.shm_root.name.removeprefix("appliance-") and len(one.box_id) == 8


def test_sockets_fit_a_unix_address_however_deep_the_data_directory_lies():
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


def test_everything_is_private_and_the_token_is_made_once(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    token = paths.ray_token.read_text()
    paths.create()
    assert paths.ray_token.read_text() == token and len(bytes.fromhex(token)) == 32
    assert os.stat(paths.ray_token).st_mode & 0o777 == 0o600
    for folder in (paths.data_dir, paths.shm_root, paths.run, paths.jobs):
        assert os.stat(folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("where", ["", "models", "shm"])
def test_a_directory_that_others_may_write_to_or_have_made_is_not_used(tmp_path, monkeypatch, where):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    folder = paths.shm_root if where == "shm" else paths.data_dir / where
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    if not where:
        paths.ray_token.write_text("known to another user")
    with pytest.raises(UnsafeFolder, match="mode 777.*chmod o-w"):
        paths.create()
    folder.chmod(0o775)
    paths.create()  # a group is given by whoever runs the box
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFolder, match="belongs to user"):
        paths.create()


def test_what_the_main_process_makes_is_its_owners_alone(tmp_path, monkeypatch):
    async def fails(config, paths, state, show):
        (paths.logs / "ray.log").open("ab").close()  # as those of its children are opened
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
def test_start_fails_where_box_json_cannot_be_written(tmp_path, mode):
    """No command would find that box, and `up --detach` would wait for it for ever."""
    config = BoxConfig.model_validate({"box": {"data_dir": str(tmp_path / "box")}})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "box" / "box.json").mkdir(parents=True)  # no file can replace it
    (tmp_path / "box").chmod(mode)
    before = os.umask(0o022)
    try:
        assert main.main(["up", "--config", str(tmp_path / "config.json")]) == 1
    finally:
        os.umask(before)
        shutil.rmtree(BoxPaths.of(tmp_path / "box").shm_root, ignore_errors=True)


class SlowBox:
    """Told to stop as it begins to start."""

    hopeless = ""

    def __init__(self, config, paths, state, stop):
        self.stop = stop

    async def start(self):
        self.stop()
        await asyncio.Event().wait()

    async def end(self):
        return ""


async def test_run_stopped_while_it_starts_returns_130(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "Box", SlowBox)
    paths = BoxPaths.of(tmp_path / "box", shm_mount=tmp_path)
    paths.create()
    assert await main._run(BoxConfig(), paths, main.BoxState(paths.state_file), None) == 130


def test_the_first_key_goes_into_its_file_alone(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    paths.first_key.symlink_to(tmp_path / "elsewhere")
    assert main.make_first_key(paths) is True
    with Database(paths.database) as db:
        (row,) = keys.list_live(db)
        assert keys.fingerprint(paths.first_key.read_text().strip()) == row.sha256 and "admin" in row.scopes
    assert not (tmp_path / "elsewhere").exists() and not paths.first_key.is_symlink()
    assert os.stat(paths.first_key).st_mode & 0o777 == 0o600
    assert main.make_first_key(paths) is False
