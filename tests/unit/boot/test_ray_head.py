"""Ray still has the undocumented settings used here; a Ray release without them would ignore them silently."""

import importlib.util
import mmap
from pathlib import Path

import pytest

from appliance.boot.main import Box, BoxState
from appliance.boot.ray_head import box_environment
from appliance.config import BoxConfig
from appliance.paths import BoxPaths

RAYLET = Path(importlib.util.find_spec("ray").origin).parent / "core/src/ray/raylet/raylet"


@pytest.fixture
def settings(tmp_path):
    every = box_environment(BoxPaths.of(tmp_path), start_timeout_s=240.0)
    return {name: value for name, value in every.items() if name.startswith("RAY_")}


def test_installed_raylet_knows_every_raylet_setting(settings):
    of_raylet = [name for name in settings if any(letter.islower() for letter in name.removeprefix("RAY_"))]
    assert len(of_raylet) >= 8
    with open(RAYLET, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        unknown = [name for name in of_raylet if binary.find(name.encode() + b"\0") < 0]
    assert unknown == []


def test_ray_with_node_address_uses_mutual_tls(tmp_path):
    """The raylet must know these settings: without them it silently uses plain text."""
    address = {"node_address": "127.0.0.1"}
    boxes = [
        Box(
            BoxConfig.model_validate({"box": {"data_dir": str(tmp_path / name), **more}}),
            BoxPaths(tmp_path / name, tmp_path / "shm"),
            BoxState(tmp_path / "box.json"),
        )
        for name, more in (("alone", {}), ("home", address))
        if made(tmp_path / name)
    ]
    alone, home = (box._environment for box in boxes)
    assert not any("TLS" in name for name in alone if name.startswith("RAY_"))
    secure = {name: value for name, value in home.items() if name.startswith("RAY_") and "TLS" in name}
    assert secure.pop("RAY_USE_TLS") == "1"
    for path in map(Path, secure.values()):
        assert path.stat().st_mode & 0o777 == 0o600 and path.is_relative_to(tmp_path / "home")
    assert len(secure) == 3 and home["RAY_AUTH_MODE"] == "token", "the token is asked for within"
    with open(RAYLET, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        assert [name for name in ["RAY_USE_TLS", *secure] if binary.find(name.encode() + b"\0") < 0] == []


def made(folder):
    folder.mkdir()
    (folder / "ray.token").write_text("token")
    return folder
