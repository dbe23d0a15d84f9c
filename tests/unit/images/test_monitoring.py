"""Rules and dashboard of images/monitoring; tests/e2e/test_box.py checks that a box has their series."""

import re
import subprocess
import sys

import yaml

from tests.tools.monitored import MONITORING
from tests.unit.cli.test_tree import is_command


def test_dashboard_json_matches_its_generator():
    written = subprocess.run([sys.executable, MONITORING / "dashboard.py"], capture_output=True, text=True, check=True)
    assert written.stdout == (MONITORING / "dashboard.json").read_text(), "python images/monitoring/dashboard.py"


def test_alerts_have_severity_and_remedy_with_existing_commands():
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 15
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert alert["annotations"].keys() == {"summary", "remedy"}, alert["alert"]
    tested = (MONITORING / "rules_test.yml").read_text()
    named = {alert["alert"] for alert in alerts if f"alertname: {alert['alert']}," in tested}
    assert len(named) >= 10
    remedies = [alert["annotations"]["remedy"].replace("{{ $labels.", "X") for alert in alerts]
    named = [words for remedy in remedies for words in re.findall(r"appliance ((?:[a-z]+ ?)+)", remedy)]
    assert len(named) > 20 and [words for words in named if not is_command(words)] == []
