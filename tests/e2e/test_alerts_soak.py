"""Alerts as the person on duty gets them: a real Prometheus with the rules of images/monitoring scrapes a whole box on
which the cause of each is made. Without `for:`, else each would take its ten minutes.

It needs Debian's `prometheus` and root, for a small disk of its own. It prints what each alert said, and what the box
said of a rank that runs half of the time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.e2e.prometheus_support import prometheus
from tests.unit.cli.test_tree import is_command
from tests.unit.gateway.certificates import self_signed

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus (Debian: apt-get install prometheus)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk"),
]
DISK_BYTES = 512 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def half_of_the_time(pid: int) -> Iterator[None]:
    """The process is stopped for every second twentieth of a second, as where another takes half of its processor."""
    over = threading.Event()

    def pulse() -> None:
        while not over.wait(0.05):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)

    pulses = threading.Thread(target=pulse)
    pulses.start()
    try:
        yield
    finally:
        over.set()
        pulses.join()


def firing(address: str) -> dict[str, dict[str, str]]:
    """Annotations by alert and its device, disk or part, once Prometheus has scraped the box."""
    try:
        seen = httpx.get(f"{address}/query", params={"query": "count(up)"}).json()["data"]["result"]
        alerts = httpx.get(f"{address}/alerts").json()["data"]["alerts"]
    except httpx.TransportError:
        return {}
    if not seen:
        return {}
    found = {}
    for alert in alerts:
        labels = alert["labels"]
        of = next((labels[name] for name in ("device", "mount", "part") if name in labels), "")
        found[f"{labels['alertname']} {of}".strip()] = alert["annotations"]
    return found


def test_each_alert_fires_where_its_cause_is_made_and_says_what_to_do(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, days=5)
    with small_disk(tmp_path / "box") as data_dir:
        (data_dir / "appliance.toml").write_text(
            f'[box]\ndevices = 2\nstart_timeout_s = 600\n[gateway]\ntls_cert_path = "{cert}"\ntls_key_path = "{key}"\n'
        )
        box = WholeBox(data_dir)
        try:
            (tmp_path / "backups").mkdir()
            box.run("up", "--detach", "--port", str(box.port))
            box.run("backup", "make", str(tmp_path / "backups"))
            with prometheus(tmp_path / "prometheus", box, tls=True) as address:
                wait_for(lambda: set(firing(address)) == {"CertificateExpires"}, "a box that is well otherwise", 180)

                box.run("gpu", "drain", "n0/1", "--reason", "fan")
                newest = BoxPaths.of(data_dir).last_backup
                newest.write_text(json.dumps(json.loads(newest.read_text()) | {"made_s": time.time() - 3 * 86400}))
                free = shutil.disk_usage(data_dir).free
                with open(data_dir / "ballast", "wb") as ballast:
                    os.posix_fallocate(ballast.fileno(), 0, free - DISK_BYTES // 20)
                wanted = {
                    "CertificateExpires",
                    "DeviceUnhealthy n0/1",
                    "BackupOld",
                    "DiskFull data",
                }
                found = wait_for(lambda: (now := firing(address)).keys() >= wanted and now, f"{wanted}", 180)
                for name, told in sorted(found.items()):
                    print(f"{name}: {told['summary']} -> {told['remedy']}", flush=True)
                    assert "{{" not in told["summary"] + told["remedy"]
                    assert all(is_command(words) for words in re.findall(r"appliance ((?:[a-z]+ ?)+)", told["remedy"]))
                assert set(found) == wanted

                (data_dir / "ballast").unlink()
                box.run("gpu", "undrain", "n0/1")
                box.run("backup", "make", str(tmp_path / "backups"))
                wait_for(lambda: set(firing(address)) == {"CertificateExpires"}, "all others to be over", 180)
                box.run("down")
                wait_for(lambda: "BoxDown" in firing(address), "the box to be missed", 60)
        finally:
            box.destroy()


def test_a_rank_that_runs_half_of_the_time_is_named_to_its_owner_and_to_who_is_on_duty(tmp_path: Path) -> None:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    settings = "[box]\ndevices = 2\nstart_timeout_s = 600\n[serve]\nstart_timeout_s = 600\n"
    with whole_box(data_dir, settings) as box, prometheus(tmp_path / "prometheus", box) as address:
        box.make_starter()
        box.set_mode(policy="train")
        options = "--epochs 50 --batch-size 8 --min-devices 2 --set max_length=256"
        job = box.submit("starter", box.upload(gsm8k("train", 64)), options)
        wait_for(lambda: len(box.losses(job)) >= 3, "the first steps", 600)
        (slow,) = box.pids_logging_to(f"{job}-rank1.log")

        with half_of_the_time(slow):
            device = box.admin(f"jobs/{job}")["devices"][1]
            alert = wait_for(lambda: firing(address).get(f"RankSlow {device}"), "the alert", 1200)
            print(f"RankSlow: {alert['summary']} -> {alert['remedy']}")
        box.run("job", "cancel", job)
