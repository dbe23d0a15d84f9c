"""The dashboard of images/monitoring, drawn from what a real Prometheus has of a box that serves, trains and switches.

It needs Debian's `prometheus`. It prints which panels stayed empty, and where the picture is.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from appliance.demo.load_generator import Load
from tests.e2e.box_support import gsm8k, wait_for, whole_box
from tests.e2e.prometheus_support import prometheus
from tests.tools.dashboard_picture import draw

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus (Debian: apt-get install prometheus)"),
]
SETTINGS = """
[box]
devices = 2
start_timeout_s = 600
[serve]
start_timeout_s = 600
"""
OF_GPUS = {
    "Share of the devices' rate that training uses (MFU)",
    "Temperature",
    "Power",
    "Time computing",
    "Memory in use",
    "Clock",
    "Slowed down by",
}


def test_every_panel_has_something_to_show(tmp_path: Path) -> None:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    (tmp_path / "backups").mkdir()
    with whole_box(data_dir, SETTINGS) as box:
        box.make_starter()
        box.run("backup", "make", str(tmp_path / "backups"))
        job = box.submit("starter", box.upload(gsm8k("train", 48)), "--epochs 40 --batch-size 4 --min-devices 1")
        with prometheus(tmp_path / "prometheus", box) as address:
            since_s = time.time()
            with Load(box.url, box.key, "starter", workers=2) as load:
                box.set_mode(policy="split", train_devices=1)
                wait_for(lambda: len(box.losses(job)) >= 10, "ten steps", 240)
                box.run("profile", "job", job, "--steps", "1")
                box.set_mode(policy="serve")
                wait_for(lambda: load.finished >= 40, "forty answers", 240)
                box.set_mode(policy="split", train_devices=1)
                seen = len(box.losses(job))
                wait_for(lambda: len(box.losses(job)) >= seen + 5, "further steps", 240)
            picture = tmp_path / "dashboard.png"
            empty = set(draw(address, since_s, time.time(), picture))
        print(f"{load.report().requests} requests; no data in {sorted(empty)}; {picture}")
        assert picture.stat().st_size > 50_000
        assert empty == OF_GPUS
        box.run("job", "cancel", job)
