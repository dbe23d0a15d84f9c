"""What `scheduler.ray_start` leaves out of Ray is where it is looked for, and can be done without."""

import inspect
import subprocess
import sys

import pytest
from ray._private.node import Node

from scheduler.ray_start import _without_dashboard, _without_ray_client

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
assert Node.start_ray_client_server is ray_start._without_ray_client
"""


def test_start_works_without_the_other_commands():
    ended = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "--include-log-monitor" in ended.stdout


@pytest.mark.parametrize(
    ("name", "ours"),
    [("start_api_server", _without_dashboard), ("start_ray_client_server", _without_ray_client)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stands_for_a_part_of_ray_is_called_as_it_was(name, ours):
    theirs, ours = (inspect.signature(function).parameters for function in (getattr(Node, name), ours))
    assert [(p.name, p.kind) for p in theirs.values()][1:] == [(p.name, p.kind) for p in ours.values()][1:]
    assert f"self.{name}(" in inspect.getsource(Node.start_head_processes)


def test_who_asks_for_the_dashboard_is_told_that_there_is_none():
    with pytest.raises(ValueError, match="no dashboard"):
        _without_dashboard(None, include_dashboard=None, raise_on_failure=True)
