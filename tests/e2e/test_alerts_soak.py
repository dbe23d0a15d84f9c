"""Alerts as the person on duty gets them: a real Prometheus with the rules of images/monitoring scrapes a whole box on
which the cause of each is made. Without `for:`, else each would take its ten minutes.

It needs Debian's `prometheus` and root, for a small disk of its own. It prints what each alert said.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import WholeBox, wait_for
from tests.e2e.prometheus_support import prometheus
from tests.unit.cli.test_tree import is_command
from tests.unit.gateway.certificates import self_signed

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
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


def firing(address: str) -> dict[str, dict[str, str]]:
    """Annotations by alert and its device, disk or part, once Prometheus has scraped the box. Without the
    doctor's, who looks a minute after the start and then once a day: with luck at the full disk."""
    try:
        seen = httpx.get(f"{address}/query", params={"query": "count(up)"}).json()["data"]["result"]
        alerts = httpx.get(f"{address}/alerts").json()["data"]["alerts"]
    except httpx.TransportError:
        return {}
    if not seen:
        return {}
    found = {}
    for alert in (one for one in alerts if one["labels"]["alertname"] != "DoctorFinds"):
        labels = alert["labels"]
        of = next((labels[name] for name in ("device", "mount", "part") if name in labels), "")
        found[f"{labels['alertname']} {of}".strip()] = alert["annotations"]
    return found


def test_each_alert_fires_where_its_cause_is_made_and_says_what_to_do(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, days=5)
    with small_disk(tmp_path / "box") as data_dir:
        (data_dir / "appliance.toml").write_text(
            f'[box]\ndevices = 2\n[gateway]\ntls_cert_path = "{cert}"\ntls_key_path = "{key}"\n'
            '[backup]\nevery_hours = 24\nurl = "/dev/null/nowhere"\n'
        )
        box = WholeBox(data_dir)
        try:
            (tmp_path / "backups").mkdir()
            box.run("up", "--detach", "--port", str(box.port))
            box.run("backup", "make", str(tmp_path / "backups"))  # so that none is due
            with prometheus(tmp_path / "prometheus", box, tls=True) as address:
                # The box had no backup when it began, and none could be taken where it is to be.
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
                    "PartDegraded backup",
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
