"""Decides which models may be woken for work without a client: it gives way to interactive requests and to training.

An awake engine works on it in every mode: it holds its devices anyway. A model without an awake engine is woken only if
that takes nothing from others:

- mode serve and split: the devices belong to serving; while no other model has requests, or a device is free;
- mode auto: the same, but only while no job wants devices;
- mode train: never. It waits for another mode, or until an interactive request wakes an engine.

Engines that write or judge the samples of a training job belong to training: they are woken in every mode, and stay
awake while the job runs. Where there is no device for both, the job gives way (scheduler.plan.shares).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from appliance.controller.bus.asking import Asking
from appliance.controller.bus.bus import Bus
from appliance.controller.devices.mode import mode_in_force
from appliance.controller.engines.routing_table import BusRouting
from appliance.gateway.core.table import OPEN
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs
from scheduler.core.workload import Demand, Policy
from weights.format.names import policy_name


def may_wake(policy: Policy, *, jobs_want_devices: bool, others_have_requests: bool, free_devices: int) -> bool:
    """Whether a model may be woken, or kept awake. policy: the one in force. others_have_requests: another model has
    requests. free_devices: how many nobody holds."""
    if policy.kind == "train" or (policy.kind == "auto" and jobs_want_devices):
        return False
    return not others_have_requests or free_devices > 0


class Wishes:
    """box_floor: devices that serving keeps in every mode."""

    def __init__(self, db: Database, bus: Bus, routing: BusRouting, asking: Asking, box_floor: int):
        self._db, self._bus, self._routing, self._asking, self._box_floor = db, bus, routing, asking, box_floor

    def demands(self, free_devices: int) -> Callable[[str], Demand]:
        """Return, for one round of the scheduler, the demand of each model: what gateways report, and this work where
        it is in nobody's way: asleep, one more request; awake, the model counts as just used, which keeps it from
        idling to sleep but claims nothing. free_devices: how many nobody holds."""
        routing, queued = self._routing, dict[str, str]()
        for name in self._asking.models:
            queued.setdefault(routing.host(name), name)
        running = [policy_name(row.id) for row in jobs.list_in_phase(self._db, "running")]
        policies = [name for name in routing.policies if name in running or name in self._asking.models]
        sampled = {routing.host(name) for name in [*policies, *job_records.teachers_of_running(self._db)]}
        requested = {name for name, row in self._bus.load().models.items() if row.inflight or row.held}

        @cache
        def in_force() -> tuple[Policy, bool]:
            policy = mode_in_force(self._db, self._box_floor, time.time()).policy
            return policy, jobs.any_wants_devices(self._db)

        def demand(host: str) -> Demand:
            reported, name = routing.demand(host), queued.get(host)
            if (name is None and host not in sampled) or reported.requests:
                return reported
            policy, jobs_want = in_force()
            now = {"others_have_requests": bool(requested - {host, name or host}), "free_devices": free_devices}
            row = self._bus.models.get(name or host, {})
            awake = any(replica["state"] == OPEN for replica in row.get("replicas", ()))
            for_samples = host in sampled and (awake or name is not None)
            if not for_samples and (name is None or not may_wake(policy, jobs_want_devices=jobs_want, **now)):
                return reported
            return replace(reported, last_request_s=time.time()) if awake else replace(reported, held=reported.held + 1)

        return demand
