"""Settings of Ray without documentation: it takes unknown ones in silence, so a release may drop them unnoticed."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

import pytest

from appliance.paths import BoxPaths
from appliance.ray_head import environment

RAYLET = Path(importlib.util.find_spec("ray").origin).parent / "core/src/ray/raylet/raylet"


@pytest.fixture
def settings(tmp_path):
    return environment(BoxPaths.of(tmp_path), start_timeout_s=240.0)


def test_rays_own_limits_follow_ours(settings):
    assert settings["RAY_raylet_start_wait_time_s"] == settings["RAY_worker_register_timeout_seconds"] == "240"
    assert settings["RAY_agent_register_timeout_ms"] == "240000"


def test_the_installed_raylet_knows_every_setting_of_its_own(settings):
    of_raylet = [name for name in settings if any(letter.islower() for letter in name.removeprefix("RAY_"))]
    assert len(of_raylet) >= 8
    with open(RAYLET, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        unknown = [name for name in of_raylet if binary.find(name.encode() + b"\0") < 0]
    assert unknown == []
