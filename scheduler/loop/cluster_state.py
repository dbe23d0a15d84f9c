"""Keeps what the scheduler knows of the world: the last observed box, events since then, and failures.

`look` observes the box again and again; events only make changes known sooner. The state of a holder that a hand-over
is moving comes from its moves: neither an observation nor an event changes it until they have ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.failures import Failures
from scheduler.core.inventory import Holder
from scheduler.core.workload import ReplicaView
from scheduler.handover.effects import Box, Effects, Event, GroupEnded, InventoryChanged, ReplicaDied
from scheduler.handover.ports import Clock, StateStore

log = logging.getLogger(__name__)


class ClusterState:
    """Owns the box, the failures and the events not yet applied. `look_again_s`: when to observe the world again."""

    def __init__(self, effects: Effects, clock: Clock, config: SchedulerConfig, store: StateStore):
        self._effects, self._clock, self._config, self._store = effects, clock, config, store
        self.box = Box()
        self.failures = Failures(config)
        self.look_again_s = 0.0
        self._events: deque[Event] = deque()
        self._ended: dict[str, GroupEnded] = {}

    # --- observing

    async def look(self, moving: Mapping[Holder, object]) -> bool:
        """Observe the world and apply what it shows of holders that are outside `moving` before and after the reading.
        False if it cannot be read now; then `look_again_s` is soon."""
        busy = frozenset(moving)
        self.look_again_s = self._clock.now_s() + self._config.observe_every_s
        try:
            observed = await self._effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed (%s)", error)
            self.look_again_s = self._clock.now_s() + self._config.backoff_first_s
            return False
        self._merge(observed, busy | frozenset(moving))
        self._events.extend(g.ended for g in observed.groups.values() if g.ended is not None)
        self.apply_events(moving)
        return True

    def _merge(self, observed: Box, busy: frozenset[Holder]) -> None:
        """Apply the observed state of every holder except those whose moves changed it during the reading."""
        now_s, old = self._clock.now_s(), self.box
        replicas = {r.id: replace(r, since_s=now_s, answered=True) for r in observed.replicas.values()}
        silent = {replica.id for replica in observed.replicas.values() if not replica.answered}
        # "ended" means ended and reported to the store: the events applied after this report the remaining ones.
        groups = {g.job_id: replace(g, since_s=now_s, ended=None) for g in observed.groups.values()}
        for replica in old.replicas.values():
            seen = replicas.get(replica.id)
            if seen is not None:
                seen = replicas[replica.id] = replace(seen, refused=replica.refused)
            if Holder("replica", replica.id) in busy:
                replicas[replica.id] = replica
            elif seen is not None and (replica.id in silent or seen.state == replica.state == "dead"):
                replicas[replica.id] = replica
            elif seen is None and replica.awake:
                replicas[replica.id] = self._dead(replica, "its supervisor is gone", "outside")
            elif seen is not None and seen.state == replica.state:
                replicas[replica.id] = replace(seen, since_s=replica.since_s)
            elif seen is not None and seen.state == "dead":
                replicas[replica.id] = self._dead(replica, "its process died")
        for group in old.groups.values():
            if Holder("job", group.job_id) in busy:
                groups[group.job_id] = group
            elif group.job_id in groups:
                groups[group.job_id] = replace(groups[group.job_id], since_s=group.since_s, ended=group.ended)
        for holder in busy:
            if holder.kind == "replica" and holder.id not in old.replicas:
                replicas.pop(holder.id, None)
            if holder.kind == "job" and holder.id not in old.groups:
                groups.pop(holder.id, None)
        self.box = Box(observed.devices, replicas, groups)

    # --- events

    def hear(self, event: Event) -> None:
        self._events.append(event)

    @property
    def unheard(self) -> bool:
        """Whether events wait for the moves of their holders."""
        return bool(self._events)

    def ended_meanwhile(self, job_id: str) -> bool:
        """Whether the job's ranks ended by themselves while a hand-over was moving it."""
        return job_id in self._ended

    def apply_events(self, moving: Container[Holder]) -> None:
        """Apply every event whose holder is not being moved; other events wait until its move ends."""
        later: list[Event] = []
        while self._events:
            event = self._events.popleft()
            match event:
                case ReplicaDied(replica_id, reason, blame):
                    if Holder("replica", replica_id) in moving:
                        later.append(event)
                    elif (replica := self.box.replicas.get(replica_id)) is not None and replica.state != "dead":
                        self.box = self.box.with_replica(self._dead(replica, reason, blame))
                case GroupEnded():
                    if Holder("job", event.job_id) in moving:
                        self._ended[event.job_id] = event
                        later.append(event)
                    else:
                        self._ended.pop(event.job_id, None)
                        self._group_ended(event)
                case InventoryChanged():
                    self.look_again_s = 0.0
        self._events.extend(later)

    def _dead(self, replica: ReplicaView, reason: str, blame: Blame = "own") -> ReplicaView:
        """Mark the replica dead. One that held no devices affected nobody when it died: it is only started again."""
        now_s = self._clock.now_s()
        if replica.awake and not self.failures.is_echo(replica.model, replica.version, now_s):
            lived_s = now_s - replica.since_s if replica.state in ("open", "draining") else 0.0
            reason = f"its engine died: {reason}"
            self.failures.model_failed(replica.model, replica.version, reason, now_s, blame=blame, lived_s=lived_s)
        devices = () if replica.state == "asleep" else replica.devices
        return replace(replica, state="dead", devices=devices, since_s=now_s)

    def _group_ended(self, event: GroupEnded) -> None:
        group = self.box.groups.get(event.job_id)
        if group is not None and (group.ended is not None or group.run != event.run):
            return  # already reported, or about an earlier incarnation
        if group is not None:
            self.box = self.box.with_group(replace(group, ended=event))
        if event.outcome == "failed" and event.retryable:
            if group is not None:  # else it was stopped in the meantime, for a reason in the store
                lived_s = self._clock.now_s() - group.since_s
                self.job_failed(event.job_id, event.step, event.error, blame=event.blame, lived_s=lived_s)
        else:
            self._store.job_ended(event.job_id, event.outcome, event.error)
            self.failures.jobs.pop(event.job_id, None)

    # --- failures

    def open_replicas_are_stable(self) -> None:
        """Replicas that have been open for long enough clear their model's failures."""
        now_s = self._clock.now_s()
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
        now_s = self._clock.now_s()
        failure = self.failures.job_failed(job_id, step, error, now_s, blame=blame, lived_s=lived_s)
        if self.failures.hopeless(failure):
            often = "" if failure.blame == "input" else f" (failed {failure.count} times without a step of progress)"
            self._store.job_ended(job_id, "failed", f"{error}{often}")
            self.failures.jobs.pop(job_id, None)
            return
        log.warning("%s; next try in %.1f s", error, failure.not_before_s - now_s, extra={"job_id": job_id})
