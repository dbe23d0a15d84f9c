"""What `scheduler.ray_start` leaves out of Ray is where it is looked for, and can be done without."""

import inspect
import subprocess
import sys

import pytest
from ray._private.node import Node

from scheduler.ray_start import _without_dashboard

AFTERWARDS = """
import sys
from scheduler import ray_start
sys.argv = ["ray", "start", "--help"]
try:
    ray_start.main()
except SystemExit as ended:
    assert ended.code == 0, ended
assert not any(name.partition(".")[2] == "serve" for name in sys.modules if name.startswith("ray."))
assert all(name in sys.modules and sys.modules[name] is None for name in ray_start.OTHER_COMMANDS)
from ray._private.node import Node
assert Node.start_api_server is ray_start._without_dashboard
"""


def test_start_works_without_the_other_commands():
    ended = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "--include-log-monitor" in ended.stdout


def test_nothing_of_ours_is_called_otherwise_than_what_it_stands_for():
    theirs, ours = (inspect.signature(function).parameters for function in (Node.start_api_server, _without_dashboard))
    assert [(p.name, p.kind) for p in theirs.values()][1:] == [(p.name, p.kind) for p in ours.values()][1:]
    assert "self.start_api_server(" in inspect.getsource(Node.start_head_processes)
    with pytest.raises(ValueError, match="no dashboard"):
        _without_dashboard(None, include_dashboard=None, raise_on_failure=True)
