"""Construction and exit of the controller process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from appliance.config import load_config
from appliance.controller.main import build
from appliance.paths import BoxPaths

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


def test_main_exits_while_a_thread_still_runs():
    with subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE) as controller:
        assert controller.wait(60) == 0


@pytest.mark.parametrize(
    ("table", "scheme"), [("", "http"), ('tls_cert_path = "c.pem"\ntls_key_path = "k.pem"', "https")]
)
async def test_build_sets_url_scheme_of_endpoint(tmp_path, table, scheme):
    file, paths = tmp_path / "appliance.toml", BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    file.write_text(f"[gateway]\n{table}\n")
    paths.create()
    context = build(load_config(file, {"data_dir": str(tmp_path / "data"), "devices": 2}, {}), paths).context
    with context.db:
        assert context.box["url"] == f"{scheme}://127.0.0.1:8000/v1"
