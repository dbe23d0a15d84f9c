"""Write the Grafana dashboard: python images/monitoring/dashboard.py > images/monitoring/dashboard.json

The list of panels below replaces 1,500 lines of JSON by hand. Grafana asks for the data source at import.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_ASKED = "appliance_gateway_model_requests_total"
WIDTH, HEIGHT = 24, 8  # columns of Grafana's grid, and rows of a panel


@dataclass(frozen=True)
class Panel:
    """A panel. queries: (expression, legend). unit: Grafana's unit name. width: columns of 24."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    width: int = 12
    kind: str = "timeseries"
    text: str = ""


def _quantiles(series: str) -> tuple[tuple[str, str], ...]:
    rate = f'sum by (le, model) (rate({series}_bucket{{model=~"$model"}}[$__rate_interval]))'
    return tuple(
        (f"histogram_quantile({share}, {rate})", f"p{round(share * 100)} {{{{model}}}}") for share in (0.5, 0.95)
    )


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "The box",
        (
            Panel("Mode", (("appliance_mode == 1", "{{policy}}"),), width=4, kind="stat"),
            Panel("Controller", (("appliance_controller_up", "up"),), width=4, kind="stat"),
            Panel("Devices unfit", (("count(appliance_device_healthy == 0) or vector(0)", ""),), width=4, kind="stat"),
            Panel("Requests held", (("sum(appliance_gateway_held) or vector(0)", ""),), width=4, kind="stat"),
            Panel("Jobs waiting", (("appliance_job_queue_length", ""),), width=4, kind="stat"),
            Panel(
                "Backup age",
                (("time() - appliance_backup_last_success_timestamp_seconds", ""),),
                unit="s",
                width=4,
                kind="stat",
            ),
            Panel(
                "Devices by holder",
                (("sum by (holder) (appliance_devices)", "{{holder}}"),),
                text="job: training; replica: serving; none: idle, or in a hand-over",
            ),
            Panel(
                "Hand-overs",
                (
                    ("sum by (outcome) (increase(appliance_handover_seconds_count[$__rate_interval]))", "{{outcome}}"),
                    ("appliance_handovers_running", "running"),
                ),
            ),
            Panel(
                "Duration of hand-overs",
                (
                    (
                        "rate(appliance_handover_seconds_sum[$__rate_interval])"
                        " / rate(appliance_handover_seconds_count[$__rate_interval])",
                        "{{outcome}}",
                    ),
                ),
                unit="s",
            ),
            Panel("Duration of a plan", (("appliance_scheduler_plan_seconds", ""),), unit="s"),
        ),
    ),
    (
        "Devices",
        (
            Panel("Temperature", (("appliance_device_temperature_celsius", "{{device}}"),), unit="celsius"),
            Panel("Power", (("appliance_device_power_watts", "{{device}}"),), unit="watt"),
            Panel("Utilization", (("appliance_device_utilization_ratio", "{{device}}"),), unit="percentunit"),
            Panel("Memory in use", (("appliance_device_memory_used_bytes", "{{device}}"),), unit="bytes"),
            Panel("Clock", (("appliance_device_clock_hertz", "{{device}}"),), unit="hertz"),
            Panel(
                "Slowed down by",
                (("max by (device, reason) (appliance_device_throttled) == 1", "{{device}} {{reason}}"),),
                text="power_cap: at the power limit, which is not a fault",
            ),
        ),
    ),
    (
        "Serving",
        (
            Panel(
                "Requests",
                (
                    (
                        "sum by (model, status) "
                        '(rate(appliance_gateway_model_requests_total{model=~"$model"}[$__rate_interval]))',
                        "{{model}} {{status}}",
                    ),
                ),
                unit="reqps",
            ),
            Panel(
                "Share of failed requests",
                (
                    (
                        f'(sum by (model) (rate({_ASKED}{{model=~"$model", status=~"5.."}}[$__rate_interval]))'
                        f' or 0 * sum by (model) (rate({_ASKED}{{model=~"$model"}}[$__rate_interval])))'
                        f' / sum by (model) (rate({_ASKED}{{model=~"$model"}}[$__rate_interval]))',
                        "{{model}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Tokens read and written",
                (
                    (
                        "sum by (model, direction) "
                        '(rate(appliance_gateway_tokens_total{model=~"$model"}[$__rate_interval]))',
                        "{{model}} {{direction}}",
                    ),
                    (
                        "sum by (model) "
                        '(rate(appliance_gateway_cached_tokens_total{model=~"$model"}[$__rate_interval]))',
                        "{{model}} input, from the prefix cache",
                    ),
                ),
            ),
            Panel(
                "Share of an engine's KV cache in use",
                (('appliance_engine_kv_cache_ratio{model=~"$model"}', "{{model}} {{replica}}"),),
                unit="percentunit",
            ),
            Panel(
                "Requests in engines",
                (
                    (
                        'sum by (model, state) (appliance_engine_requests{model=~"$model"})',
                        "{{model}} {{state}}",
                    ),
                    (
                        "sum by (model) "
                        '(increase(appliance_engine_preemptions_total{model=~"$model"}[$__rate_interval]))',
                        "{{model}} preempted",
                    ),
                ),
                text="preempted: evicted from the KV cache for other requests, and computed again",
            ),
            Panel(
                "Share of prompt tokens found in the prefix cache",
                (
                    (
                        "sum by (model) "
                        '(rate(appliance_engine_prefix_hit_tokens_total{model=~"$model"}[$__rate_interval])) / '
                        "sum by (model) "
                        '(rate(appliance_engine_prefix_tokens_total{model=~"$model"}[$__rate_interval]))',
                        "{{model}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel("Time to first byte", _quantiles("appliance_gateway_time_to_first_byte_seconds"), unit="s"),
            Panel("Time per output token", _quantiles("appliance_gateway_time_per_output_token_seconds"), unit="s"),
            Panel("Whole request", _quantiles("appliance_gateway_request_seconds"), unit="s"),
            Panel("Held by model", (('appliance_gateway_held{model=~"$model"}', "{{model}}"),)),
            Panel("In flight by replica", (("appliance_gateway_inflight", "{{replica}}"),)),
            Panel(
                "Replicas by state",
                (('sum by (model, state) (appliance_replicas{model=~"$model"})', "{{model}} {{state}}"),),
            ),
            Panel(
                "Time added by the gateway",
                tuple(
                    (
                        f"histogram_quantile({share}, "
                        "sum by (le) (rate(appliance_gateway_added_seconds_bucket[$__rate_interval])))",
                        f"p{share * 100:.0f}",
                    )
                    for share in (0.5, 0.99)
                ),
                unit="s",
            ),
            Panel(
                "Events", (("sum by (event) (rate(appliance_gateway_events_total[$__rate_interval]))", "{{event}}"),)
            ),
        ),
    ),
    (
        "Training",
        (
            Panel("Loss", (("appliance_job_loss", "{{job}}"),)),
            Panel("Tokens per second", (("appliance_job_tokens_per_second", "{{job}}"),)),
            Panel("Devices of a job", (("appliance_job_devices", "{{job}}"),)),
            Panel("Progress", (("appliance_job_step / appliance_job_steps", "{{job}}"),), unit="percentunit"),
            Panel(
                "Model FLOPs utilization of training (MFU)",
                (("appliance_job_mfu_ratio", "{{job}}"),),
                unit="percentunit",
            ),
            Panel("Gradient norm", (("appliance_job_gradient_norm", "{{job}}"),)),
            Panel("Learning rate", (("appliance_job_learning_rate", "{{job}}"),)),
            Panel(
                "Computing time of each rank per step",
                (("appliance_job_rank_seconds", "{{job}} rank {{rank}} on {{device}}"),),
                unit="s",
                text="forward passes of each rank; a slower rank delays all others",
            ),
            Panel("Unfinished jobs", (("appliance_jobs", "{{phase}}"),)),
        ),
    ),
    (
        "Memory and disk",
        (
            Panel("Weight store", (("appliance_weight_store_bytes", "{{what}}"),), unit="bytes"),
            Panel("Tiers", (("appliance_tier_bytes", "{{tier}}"),), unit="bytes"),
            Panel("Bytes still to copy", (("appliance_tier_backlog_bytes", "{{tier}}"),), unit="bytes"),
            Panel(
                "Free share of a file system",
                (("appliance_disk_free_bytes / appliance_disk_bytes", "{{mount}}"),),
                unit="percentunit",
            ),
            Panel("Memory of replicas", (("appliance_replica_resident_bytes", "{{replica}}"),), unit="bytes"),
            Panel(
                "Controller",
                (("appliance_controller_process_resident_memory_bytes", "resident"),),
                unit="bytes",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Build the dashboard for Grafana 10 and later (import it by Dashboards, New, Import)."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for title, row in ROWS:
        panels.append(
            _placed({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, WIDTH, 1, panels)
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_placed(_panel(panel), x, y, panel.width, HEIGHT, panels))
            x += panel.width
        y += HEIGHT
    return {
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "title": "appliance",
        "uid": "appliance-box",
        "schemaVersion": 39,
        "tags": ["appliance"],
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_models()]},
        "panels": panels,
    }


def _models() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(appliance_gateway_model_requests_total, model)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int, before: list[Any]) -> dict[str, Any]:
    return {"id": len(before) + 1, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"datasource": SOURCE, "expr": expression, "legendFormat": legend, "refId": chr(ord("A") + number)}
        for number, (expression, legend) in enumerate(panel.queries)
    ]
    by_name = {"textMode": "value_and_name" if panel.title == "Mode" else "auto"} if panel.kind == "stat" else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": by_name,
    }


def main() -> None:
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
