"""The hysteresis of `auto` with the settings of the box: how often traffic alone can make devices change hands."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView
from scheduler.plan import autoscaler

CONFIG = SchedulerConfig()
MODEL = DeploymentView("m", "v1", min_replicas=1, max_replicas=8, target_inflight=10)


def test_few_long_prompts_fill_as_many_caches_as_many_short_ones() -> None:
    long = replace(MODEL, kv_tokens=100_000, demand=Demand(inflight=4, prompt_tokens=250_000, waiting_tokens=50_000))
    assert autoscaler.load(long, CONFIG) == 2.0
    assert autoscaler.wanted_now(long, 0.0, CONFIG) == 2
    short = replace(long, demand=replace(long.demand, prompt_tokens=2_000, waiting_tokens=0))
    assert autoscaler.load(short, CONFIG) == 0.4
    assert autoscaler.load(replace(long, kv_tokens=None), CONFIG) == 0.4, "by their number where nobody knows the cache"
