"""Keeps the scheduler's knowledge of the box: the last observation, and failures.

The state of a holder that a hand-over is moving comes from its moves: no observation changes it until they have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.failures import Failures
from scheduler.core.inventory import Holder
from scheduler.core.workload import ReplicaView
from scheduler.handover.effects import Box, Effects, GroupEnded, GroupView, StateStore

log = logging.getLogger(__name__)


class ClusterState:
    """The part of the loop that owns the box and the failures. `observe_again_s`: when to observe again."""

    def __init__(self, effects: Effects, clock: Callable[[], float], config: SchedulerConfig, store: StateStore):
        self._effects, self._clock, self._config, self._store = effects, clock, config, store
        self.box = Box()
        self.failures = Failures(config)
        self.observe_again_s = 0.0
        self._discarded: frozenset[Holder] = frozenset()  # holders whose last readings were not applied

    # --- observing

    async def observe(self, moving: Mapping[Holder, object]) -> bool:
        """Read the box and apply the state of holders that are outside `moving` before and after the reading. False if
        it cannot be read now; then `observe_again_s` is soon."""
        busy = frozenset(moving)
        self.observe_again_s = self._clock() + self._config.observe_every_s
        try:
            observed = await self._effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed (%s)", error)
            self.observe_again_s = self._clock() + self._config.backoff_first_s
            return False
        self._discarded = busy | frozenset(moving)
        self._merge(observed, self._discarded)
        if self._discarded.difference(moving):  # their moves ended during the reading
            self.observe_again_s = 0.0
        return True

    def _merge(self, observed: Box, busy: frozenset[Holder]) -> None:
        """Apply the observed state of every holder except those whose moves changed it during the reading."""
        now_s, old = self._clock(), self.box
        replicas = {r.id: r for r in old.replicas.values() if Holder("replica", r.id) in busy}
        groups = {g.job_id: g for g in old.groups.values() if Holder("job", g.job_id) in busy}
        for replica in observed.replicas.values():
            known = old.replicas.get(replica.id)
            if Holder("replica", replica.id) in busy:
                continue
            if known is None:
                if replica.answered:
                    replicas[replica.id] = replace(replica, since_s=now_s)
            elif not replica.answered or replica.state == known.state == "dead":
                replicas[replica.id] = known
            elif replica.state == "dead":
                replicas[replica.id] = self._dead(known, replica.failed or "its process died", replica.blame)
            else:
                since_s = known.since_s if replica.state == known.state else now_s
                replicas[replica.id] = replace(replica, since_s=since_s, refused=known.refused)
        for known in old.replicas.values():
            if known.id not in observed.replicas and known.id not in replicas and known.awake:
                replicas[known.id] = self._dead(known, "its supervisor is gone", "outside")
        for group in observed.groups.values():
            if Holder("job", group.job_id) not in busy:
                before = old.groups.get(group.job_id)
                groups[group.job_id] = replace(group, since_s=before.since_s if before is not None else now_s)
        self.box = Box(observed.devices, replicas, groups)
        for group in groups.values():
            before = old.groups.get(group.job_id)
            if group.ended is not None and (before is None or before.ended is None):
                self._group_ended(group, group.ended)

    def _dead(self, replica: ReplicaView, reason: str, blame: Blame) -> ReplicaView:
        """Mark the replica dead. One that held no devices affected nobody when it died: it is only started again."""
        now_s = self._clock()
        if replica.awake and not self.failures.is_echo(replica.model, replica.version, now_s):
            lived_s = now_s - replica.since_s if replica.state in ("open", "draining") else 0.0
            reason = f"its engine died: {reason}"
            self.failures.model_failed(replica.model, replica.version, reason, now_s, blame=blame, lived_s=lived_s)
        devices = () if replica.state == "asleep" else replica.devices
        return replace(replica, state="dead", devices=devices, since_s=now_s)

    def _group_ended(self, group: GroupView, ended: GroupEnded) -> None:
        if ended.outcome == "failed" and ended.retryable:
            lived_s = self._clock() - group.since_s
            self.job_failed(group.job_id, ended.step, ended.error, blame=ended.blame, lived_s=lived_s)
        else:
            self._store.job_ended(group.job_id, ended.outcome, ended.error)
            self.failures.jobs.pop(group.job_id, None)

    # --- failures

    def clear_failures_of_stable_replicas(self) -> None:
        """Forget the failures of models with a replica that has been open for long enough."""
        now_s = self._clock()
        for replica in self.box.replicas.values():
            if replica.state == "open" and now_s - replica.since_s >= self._config.replica_stable_s:
                if self.failures.model(replica.model, replica.version) is not None:
                    del self.failures.models[replica.model]

    def version_refused(self, model: str, version: str, reason: str) -> None:
        """A running engine does not load the version: no other of the model is asked, new ones take their places."""
        replicas = self.box.replicas.values()
        refusing = {r.id: replace(r, refused=version) if r.model == model else r for r in replicas}
        self.box = replace(self.box, replicas=refusing)
        ids = {"model": model, "version": version}
        log.warning("a new engine is started for this version: %s", reason, extra=ids)

    def job_failed(self, job_id: str, step: int, error: str, *, blame: Blame = "own", lived_s: float = 0.0) -> None:
        now_s = self._clock()
        failure = self.failures.job_failed(job_id, step, error, now_s, blame=blame, lived_s=lived_s)
        if self.failures.hopeless(failure):
            often = "" if failure.blame == "input" else f" (failed {failure.count} times without a step of progress)"
            self._store.job_ended(job_id, "failed", f"{error}{often}")
            self.failures.jobs.pop(job_id, None)
            return
        log.warning("%s; next try in %.1f s", error, failure.not_before_s - now_s, extra={"job_id": job_id})
