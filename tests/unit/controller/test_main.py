"""How the controller's process ends."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import asyncio, sys
from types import SimpleNamespace
from appliance.controller import main

async def run(*_):
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # a thread that goes on, as one that makes a model
    return 0

main._run = run
main.load_resolved = lambda _: SimpleNamespace(box=SimpleNamespace(log_level="info", data_dir="/nowhere"))
main.die_with_parent = main.dies_as = lambda *_: None
main.main(["--config", "/nowhere", "--ray-address", "nowhere"])
"""


def test_it_ends_though_a_thread_goes_on():
    """`down` waited two minutes for a model that was being made, killed the controller, and said that not all was
    saved."""
    with subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE) as controller:
        assert controller.wait(60) == 0
