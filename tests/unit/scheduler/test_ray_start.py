"""What `scheduler.ray.start` leaves out of Ray can be spared and stands where it is looked for; what it adds, too."""

import inspect
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import node
from ray._private.node import Node
from ray.scripts import scripts

from scheduler.ray.start import (
    CODES_OF_A_REQUEST,
    _all_failed,
    _logging_to,
    _private_folder,
)


def test_rays_folders_are_its_owners_alone_and_its_logs_where_we_want_them(tmp_path, monkeypatch):
    assert "try_to_create_directory(self._logs_dir)" in inspect.getsource(Node._init_temp)
    monkeypatch.setattr(node, "try_to_create_directory", _private_folder)
    made, (temp, logs) = object.__new__(Node), (tmp_path / "ray", tmp_path / "logs")
    for folder in (temp, logs):
        folder.mkdir(mode=0o700)
    made._ray_params = SimpleNamespace(temp_dir=str(temp), runtime_env_dir_name="runtime_resources")
    made._session_name = "session_1"
    _logging_to(logs, Node._init_temp)(made, None)
    assert (Path(made.get_logs_dir_path()) / "old").samefile(logs / "old")
    modes = {path.name: path.stat().st_mode & 0o777 for path in [temp, logs, *tmp_path.rglob("*")]}
    assert modes.keys() >= {"ray", "logs", "old", "sockets"} and set(modes.values()) == {0o700}, modes


@pytest.mark.parametrize("code", ["exit 0", "kill -TERM $$", "exit 15", "exit 143", "exit 3"])
def test_ray_ends_with_each_process_of_its_however_that_ended(code):
    """A raylet ends with 0 when its agent is killed, and `ray start --block` would go on without it."""
    raylet = subprocess.Popen(["sh", "-c", code])
    raylet.wait()
    made = object.__new__(Node)
    made.all_processes = {"raylet": [SimpleNamespace(process=raylet)]}
    ((name, ended),) = _all_failed(Node.dead_processes)(made)
    assert (name, ended) == ("raylet", raylet) and ended.returncode not in CODES_OF_A_REQUEST
    source = inspect.getsource(scripts.start.callback)
    assert "deceased = node.dead_processes()" in source and "if process.returncode not in expected" in source
