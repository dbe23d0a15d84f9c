"""A real Prometheus (Debian's `prometheus`) that scrapes a whole box as images/monitoring has it, but more often."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from tests.e2e.box_support import WholeBox, free_port, wait_for
from tests.tools.monitored import MONITORING


@contextmanager
def prometheus(folder: Path, box: WholeBox, *, tls: bool = False) -> Iterator[str]:
    """The address of its API. The shipped configuration, with this box's address and certificate and shorter intervals;
    rules without `for:`, else each alert would take its ten minutes."""
    folder.mkdir()
    (folder / "key").write_text(box.ask("key", "create", "--name", "prometheus", "--scope", "metrics")["key"])
    rules = re.sub(r"\n +for: .*", "", (MONITORING / "rules.yml").read_text())
    (folder / "rules.yml").write_text(rules)
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(folder / "rules.yml")]
    (scrape,) = settings["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(folder / "key")
    if tls:
        scrape |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{box.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(lambda: _answers(port), "Prometheus")
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(port: int) -> bool:
    """While it reads what it has written it listens, and says no more than "Service Unavailable"."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready").is_success
    except httpx.TransportError:
        return False
