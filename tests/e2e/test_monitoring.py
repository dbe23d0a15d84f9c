"""Prometheus' promtool accepts the rules and the panels of images/monitoring."""

import shutil
import subprocess

import pytest
import yaml

from tests.tools.monitored import MONITORING, panel_expressions, rule_expressions


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_accepts_rules_and_panels(tmp_path):
    subprocess.run(["promtool", "test", "rules", MONITORING / "rules_test.yml"], check=True)
    shown = [text.replace("$__rate_interval", "5m").replace("$model", ".*") for text in panel_expressions()]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(shown)]
    both = tmp_path / "rules.yml"
    both.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert len(rules) > 30 and len(rule_expressions()) > 20
    subprocess.run(["promtool", "check", "rules", both, MONITORING / "rules.yml"], check=True)
