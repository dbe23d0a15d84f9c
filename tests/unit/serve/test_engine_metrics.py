"""What engines tell at a scrape does not grow with what clients ask."""

from __future__ import annotations

from itertools import permutations
from unittest.mock import MagicMock

from prometheus_client import CollectorRegistry, Gauge
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from serve.vllm.frontend import Metrics

LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]


def asked_for_in_each_order(logger: MagicMock) -> None:
    for name in LABELS:
        setattr(logger, f"labelname_{name}", name)
    for names in permutations("abcd"):
        told = dict.fromkeys(names, 1)
        PrometheusStatLogger.record(
            logger, SchedulerStats(waiting_lora_adapters=told, running_lora_adapters=told), None
        )


def test_metrics_have_no_series_for_orders_of_adapters(monkeypatch):
    logger = MagicMock(max_lora=4, gauge_lora_info=Gauge("lora", "", LABELS, registry=CollectorRegistry()))
    series = logger.gauge_lora_info._metrics
    asked_for_in_each_order(logger)
    assert len(series) == 24, "as vLLM has it"
    series.clear()
    monkeypatch.setattr(PrometheusStatLogger, "__init__", lambda self: vars(self).update(gauge_lora_info="vLLM's"))
    logger.gauge_lora_info = Metrics().gauge_lora_info
    asked_for_in_each_order(logger)
    assert not series and logger.gauge_scheduler_running[0].set.called
