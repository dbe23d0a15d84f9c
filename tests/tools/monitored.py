"""Metrics that the rules and the dashboard of images/monitoring query."""

import json
import re
from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "images" / "monitoring"
# Only boxes with TLS, backups or degraded gateways have these.
LATER = {
    "appliance_tls_expiry_seconds",
    "appliance_backup_last_success_timestamp_seconds",
    "appliance_gateway_degraded",
}
_PARTS = re.compile(r"_(?:bucket|count|sum)$")  # suffixes of histograms and summaries, not part of the family name


def rule_expressions() -> list[str]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def panel_expressions() -> list[str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def monitored_series() -> set[str]:
    """Names of metric families, as in `# TYPE` lines."""
    text = "\n".join([*rule_expressions(), *panel_expressions()])
    return {_PARTS.sub("", name) for name in re.findall(r"\bappliance_[a-z_]+", text)}
