"""The hysteresis of `auto` with the settings of the box: how often traffic alone can make devices change hands."""

from __future__ import annotations

from dataclasses import replace

from scheduler import autoscaler
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, Hysteresis, ReplicaView

CONFIG = SchedulerConfig()
MODEL = DeploymentView("m", "v1", min_replicas=1, max_replicas=8, target_inflight=10)


def test_few_long_prompts_fill_as_many_caches_as_many_short_ones() -> None:
    long = replace(MODEL, kv_tokens=100_000, demand=Demand(inflight=4, prompt_tokens=250_000, waiting_tokens=50_000))
    assert autoscaler.load(long, CONFIG) == 2.0
    assert autoscaler.wanted_now(long, 0.0, CONFIG) == 2
    short = replace(long, demand=replace(long.demand, prompt_tokens=2_000, waiting_tokens=0))
    assert autoscaler.load(short, CONFIG) == 0.4
    assert autoscaler.load(replace(long, kv_tokens=None), CONFIG) == 0.4, "by their number where nobody knows the cache"


def test_versions_asked_by_their_names_share_their_models_turn() -> None:
    versions = [replace(MODEL, model=f"m:{n}", beside="m", demand=Demand(inflight=1)) for n in range(4)]
    other = replace(MODEL, model="z", demand=Demand(inflight=1))
    waiting = {d.model: Hysteresis(replicas=1, waiting_since_s=1000.0 + n) for n, d in enumerate([*versions, other])}

    def order(opened: str, now_s: float) -> list[str]:
        replica = ReplicaView(opened, opened, "v1", "open", ("n0/0",), 1000.0)
        return [s.model for s in autoscaler.slots([*versions, other], [replica], waiting, now_s, CONFIG)]

    assert order("m:0", 1010.0)[:2] == ["m:0", "z"], "in its turn"
    assert order("m:0", 1005.0 + CONFIG.turn_s)[:2] == ["z", "m:1"], "the turn is over, for all of them"
    assert order("z", 1005.0 + CONFIG.turn_s)[:2] == ["m:0", "z"]


def test_a_models_second_version_that_is_asked_comes_before_models_that_nobody_asks() -> None:
    asked = [
        replace(MODEL, model="a:ck", beside="a", min_replicas=0, demand=Demand(inflight=1)),
        replace(MODEL, model="a", min_replicas=0, demand=Demand(inflight=1)),
    ]
    least = replace(MODEL, model="b", min_replicas=1)
    opened = [ReplicaView(name, name, "v1", "open", (f"n0/{n}",), 1000.0) for n, name in enumerate(("a:ck", "b"))]
    hysteresis = {d.model: Hysteresis(replicas=1) for d in (*asked, least)}
    hysteresis["a"] = Hysteresis(replicas=1, waiting_since_s=1001.0)

    def order(*deployments: DeploymentView) -> list[str]:
        found = autoscaler.slots([*asked, *deployments], opened, hysteresis, 1005.0, CONFIG)
        return [slot.model for slot in found if slot.wanted]

    assert order(least) == ["a:ck", "a", "b"]
    a_moment_ago = Demand(last_request_s=1005.0 - CONFIG.turn_s / 2)
    assert order(replace(least, demand=a_moment_ago)) == ["a:ck", "b", "a"], "each short request cost two hand-overs"
    assert order(replace(least, demand=Demand(last_request_s=1004.0 - CONFIG.turn_s))) == ["a:ck", "a", "b"]
    assert order(replace(least, pinned=True)) == ["b", "a:ck", "a"]
    assert order(replace(least, demand=Demand(inflight=1))) == ["a:ck", "b", "a"], "asked itself, it comes first"
