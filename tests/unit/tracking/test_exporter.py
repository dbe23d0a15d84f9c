"""The exporter's process: what it imports, what it says of a tracker that is slow or not installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.boot.tracking import ProcessFailed, TrackingProcess, read_credentials
from appliance.config import ConfigError, TrackingSettings, load_config
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.tracking import main as exporter


def test_it_needs_the_standard_library_alone(tmp_path: Path):
    """Its interpreter need not be the box's own. -S: without any package that is installed."""
    root = Path(exporter.__file__).parents[2]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); import appliance.tracking.main"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def paths(tmp_path: Path) -> BoxPaths:
    (tmp_path / "shm").mkdir()
    paths = BoxPaths.of(tmp_path / "data", tmp_path / "shm")
    paths.create()
    Database(paths.database).close()
    return paths


async def test_a_library_that_is_not_there_is_said_in_the_status_and_ends_nothing(paths: BoxPaths):
    """As a process of the box: it starts, keeps running, and says what is wrong."""
    settings = TrackingSettings(mlflow_uri="http://127.0.0.1:9", wandb_mode="offline", python=sys.executable)
    process = TrackingProcess(settings, paths, {"PATH": "/usr/bin:/bin", "WANDB_MODE": "online"})
    running = asyncio.create_task(process.run())
    async with asyncio.timeout(60):
        while not process.status_file.exists() or len(troubles := _troubles(process)) < 2:
            assert not running.done(), (running.exception(), (paths.logs / "tracking.log").read_text())
            await asyncio.sleep(0.05)
    assert [one["name"] for one in troubles] == ["tracking: mlflow", "tracking: wandb"]
    assert all("is not installed for" in one["why"] for one in troubles)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_exporter_that_cannot_start_says_why(paths: BoxPaths):
    settings = TrackingSettings(mlflow_uri="http://127.0.0.1:9", python="/bin/false")
    with pytest.raises(ProcessFailed, match="ended with exit code 1"):
        await TrackingProcess(settings, paths, {}).run()
    gone = TrackingSettings(mlflow_uri="http://127.0.0.1:9", python="/none/python")
    with pytest.raises(FileNotFoundError, match="/none/python"):
        await TrackingProcess(gone, paths, {}).run()


def _troubles(process: TrackingProcess) -> list[dict[str, Any]]:
    return json.loads(process.status_file.read_text())["troubles"]


@pytest.mark.parametrize(
    ("text", "mode", "fault"),
    [
        ("WANDB_API_KEY=k\n", 0o644, "open to other users"),
        ("AWS_SECRET_ACCESS_KEY=x\n", 0o600, "line 1"),
        ("# key\n\nWANDB_API_KEY\n", 0o600, "line 3"),
    ],
)
def test_a_file_of_secrets_that_is_not_fit_is_refused(tmp_path: Path, text: str, mode: int, fault: str):
    file = tmp_path / "secrets"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ProcessFailed, match=fault):
        read_credentials(str(file))


def test_secrets_are_read_from_a_file_and_from_nowhere_else(tmp_path: Path):
    file = tmp_path / "secrets"
    file.write_text("# ours\nWANDB_API_KEY = 'abc'\nMLFLOW_TRACKING_TOKEN=d=e\n")
    file.chmod(0o600)
    assert read_credentials(None) == {}
    with pytest.raises(ProcessFailed, match="cannot be read"):
        read_credentials(str(tmp_path / "none"))
    assert read_credentials(str(file)) == {"WANDB_API_KEY": "abc", "MLFLOW_TRACKING_TOKEN": "d=e"}


def test_nothing_is_sent_out_unasked_and_no_password_stands_in_an_address(tmp_path: Path):
    assert not TrackingSettings().is_on
    file = tmp_path / "appliance.toml"
    file.write_text('[tracking]\nmlflow_uri = "https://me:secret@mlflow.example"\n')
    with pytest.raises(ConfigError, match="credentials in its URL.*credentials_file") as refused:
        load_config(file)
    assert "me:secret" not in str(refused.value)
