"""Decides which models may be woken for work without a client: it gives way to interactive requests and to training.

An awake engine works on it in every mode: it holds its devices anyway. A model without an awake engine is woken only if
that takes nothing from others:

- mode serve and split: the devices belong to serving; while no other model has requests, or a device is free;
- mode auto: the same, but only while no job wants devices;
- mode train: never. It waits for another mode, or until an interactive request wakes an engine.

Rollouts of a training job take no device from training either, above all none of their own job: `may_wake_to_sample`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import mode_in_force
from appliance.gateway.routing.table import OPEN
from appliance.store.database import Database
from appliance.store.objects import jobs
from scheduler.core.workload import Demand


@dataclass(frozen=True, slots=True)
class Circumstances:
    """policy, floor (devices that serving keeps): those in force. free_devices: how many nobody holds."""

    policy: str
    jobs_want_devices: bool
    free_devices: int
    floor: int = 0


def circumstances(db: Database, box_floor: int, loop_status: Callable[[], Mapping[str, Any]]) -> Circumstances:
    policy = mode_in_force(db, box_floor, time.time()).policy
    free = sum(device["holder"] is None for device in loop_status()["devices"])
    return Circumstances(policy.kind, jobs.any_wants_devices(db), free, policy.serving_floor)


def may_wake(now: Circumstances, others_have_requests: bool) -> bool:
    """Whether a model may be woken, or kept awake. others_have_requests: another model has requests."""
    if now.policy == "train" or (now.policy == "auto" and now.jobs_want_devices):
        return False
    return not others_have_requests or now.free_devices > 0


def may_wake_to_sample(now: Circumstances, others_have_requests: bool) -> bool:
    """Whether a model may be woken for the rollouts of a job that trains: one asleep claims a device that serving keeps
    whatever training wants, where no other model has requests, or one that nobody holds."""
    theirs = now.policy in ("serve", "split") or now.floor > 0
    return now.free_devices > 0 or (theirs and not others_have_requests)


@dataclass(frozen=True, slots=True)
class Wishes:
    """hosts: the model on whose engines a name is served. lines, sampled: the names that are asked for, and those that
    rollouts need."""

    bus: Bus
    hosts: Callable[[str], str]
    lines: Callable[[], Collection[str]]
    sampled: Callable[[], Collection[str]]
    circumstances: Callable[[], Circumstances]

    def demands(self) -> Callable[[str, Demand], Demand]:
        """Return, for one round of the scheduler, a function that adds this work to the demand that gateways report of
        a model, where it is in nobody's way: asleep, one more request; awake, the model counts as just used, which
        keeps it from idling to sleep but claims nothing."""
        lines: dict[str, str] = {}
        for name in self.lines():
            lines.setdefault(self.hosts(name), name)
        sampled = {self.hosts(name) for name in self.sampled()}
        asked = {name for name, row in self.bus.load().models.items() if row.inflight or row.held}
        look = cache(self.circumstances)

        def demand(host: str, reported: Demand) -> Demand:
            name = lines.get(host)
            if (name is None and host not in sampled) or reported.requests:
                return reported
            now, others = look(), bool(asked - {host, name or host})
            row = self.bus.models.get(name or host, {})
            awake = any(replica["state"] == OPEN for replica in row.get("replicas", ()))
            for_samples = host in sampled and (awake or may_wake_to_sample(now, others))
            if not for_samples and (name is None or not may_wake(now, others)):
                return reported
            return replace(reported, last_request_s=time.time()) if awake else replace(reported, held=reported.held + 1)

        return demand
