"""Keeps the scheduler's knowledge of the box: requests, the last observation, failures, and the planner's view of them.
While a hand-over moves a holder, the holder's state comes from its moves, and observations of it are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import Blame, EffectFailed
from scheduler.core.failures import Cause, Failures
from scheduler.core.workload import Holder, JobView, Policy, ReplicaView, Workload
from scheduler.handover.effects import Box, Effects, GroupEnded, GroupView, StateStore
from scheduler.handover.handover import Move, Runner, RunningStep

log = logging.getLogger(__name__)


class Inbox:
    """Collects requests and hints for the scheduler loop between rounds. It exists before the loop, for parts that only
    report to the loop, and shares its asyncio loop. generation: number of the newest nudge."""

    def __init__(self) -> None:
        self.generation = 0
        self.changed = asyncio.Event()
        self._requests: list[tuple[int, str, str]] = []  # (generation, requester, request)
        self._resolved: list[Cause] = []

    def nudge(self, by: str = "", request: str = "") -> int:
        """Report a change in the store or in the demand: plan soon. Returns the generation for `wait_settled`.

        by: requesting user, "" for the box itself. request: text for the history, "" if nothing was requested."""
        self.generation += 1
        if request:
            self._requests.append((self.generation, by or "box", request))
        self.changed.set()
        return self.generation

    def retry(self, cause: Cause) -> None:
        """Retry at once the jobs and models that may have failed for this cause, because the cause is gone."""
        self._resolved.append(cause)
        self.nudge()

    def take_resolved(self) -> list[Cause]:
        resolved, self._resolved = self._resolved, []
        return resolved

    def newest_request(self, settled: int) -> tuple[str, str] | None:
        """Return requester and text of the newest request after generation `settled`; drop requests up to `settled`."""
        self._requests = [request for request in self._requests if request[0] > settled]
        return self._requests[-1][1:] if self._requests else None


@dataclass(slots=True)
class Transition:
    """A holder that a hand-over is moving. moves: number of moves that have not ended. target: devices it will hold.
    over: True if it ended by itself before it was suspended."""

    moves: int = 0
    target: tuple[str, ...] = ()
    take: Move | None = None
    over: bool = False


class ClusterState:
    """The part of the loop that owns the box's state and failures. `observe_again_s`: time of the next observation."""

    def __init__(self, effects: Effects, clock: Callable[[], float], config: SchedulerConfig, store: StateStore):
        self._effects, self._clock, self._config, self._store = effects, clock, config, store
        self.box = Box()
        self.failures = Failures(config)
        self.observe_again_s = 0.0
        self._discarded: frozenset[Holder] = frozenset()  # holders whose last observation was not applied

    # --- observation

    async def observe(self, moving: Mapping[Holder, object]) -> bool:
        """Read the box, and apply the states of holders that were outside `moving` before and after the reading. False
        if the box cannot be read now; then `observe_again_s` is soon."""
        busy = frozenset(moving)
        self.observe_again_s = self._clock() + self._config.observe_every_s
        try:
            observed = await self._effects.observe()
            silent = {replica.id for replica in observed.replicas.values() if not replica.answered}
            if unknown := silent - self.box.replicas.keys() - {h.id for h in busy}:  # else these devices seem free
                raise EffectFailed(f"{', '.join(sorted(unknown))} did not answer yet")
        except EffectFailed as error:
            log.warning("the box cannot be observed (%s)", error)
            self.observe_again_s = self._clock() + self._config.backoff_first_s
            return False
        self._discarded = busy | frozenset(moving)
        self._merge(observed, self._discarded)
        if self._discarded.difference(moving):  # holders whose moves ended during the observation
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
        """Mark the replica dead. The death of a replica without devices does not count as a failure."""
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
        """Forget the failures of models with a replica that has been open for `replica_stable_s`."""
        now_s = self._clock()
        for replica in self.box.replicas.values():
            if replica.state == "open" and now_s - replica.since_s >= self._config.replica_stable_s:
                if self.failures.model(replica.model, replica.version) is not None:
                    del self.failures.models[replica.model]

    def version_refused(self, model: str, version: str, reason: str) -> None:
        """Record that a running engine cannot load the version: the planner replaces all engines of the model."""
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


# --- the planner's view, with every moving holder at its target; pure functions


def job_view(
    job: JobView, box: Box, all_moving: Mapping[Holder, Transition], failures: Failures, pauses_s: Mapping[str, float]
) -> JobView:
    group = box.groups.get(job.id)
    moving = all_moving.get(Holder("job", job.id))
    failure = failures.jobs.get(job.id)
    alive = group is not None and group.ended is None
    phase = job.phase
    if phase != "paused":
        phase = "running" if alive else "suspended" if phase == "running" else phase
    devices = group.devices if group is not None and alive else ()
    busy = None
    if moving is not None:
        busy = "coming" if moving.target else "leaving"
        devices = moving.target or devices
    return replace(
        job,
        phase=phase,
        devices=devices,
        since_s=group.since_s if group else 0.0,
        not_before_s=failure.not_before_s if failure else 0.0,
        failed=failure.reason if failure else "",
        busy=busy,
        pause_s=pauses_s.get(job.id),
    )


def replica_views(box: Box, all_moving: Mapping[Holder, Transition], now_s: float) -> list[ReplicaView]:
    views = dict(box.replicas)
    for holder, moving in all_moving.items():
        if holder.kind != "replica":
            continue
        replica = views.get(holder.id)
        plan = moving.take.plan if moving.take is not None else None
        if moving.target and plan is not None and replica is None:
            replica = replace(plan, state="starting", since_s=now_s)
        if replica is not None:
            views[holder.id] = replace(replica, busy="coming" if moving.target else "leaving")
    return list(views.values())


def is_doubtful_drain(runner: Runner, step: RunningStep, policy: Policy, workload: Workload) -> bool:
    """Whether the reason to drain an open replica may be gone: the mode has changed, or its model has more requests
    than when the drain was decided. Only external changes count, so that plans do not oscillate."""
    replica = runner.before.replicas.get(step.move.holder.id)
    if replica is None or replica.state != "open":
        return False
    before, now = (
        next((d.demand.requests for d in known.deployments if d.model == replica.model), 0)
        for known in (runner.workload, workload)
    )
    return runner.policy != policy or now > before


def as_if_not_begun(
    box: Box, moving: Mapping[Holder, Transition], steps: Iterable[tuple[Runner, RunningStep]]
) -> tuple[Box, dict[Holder, Transition]]:
    """Return box and transitions as if these drains, and moves that wait for the drained devices, had not begun, and as
    if starting ranks were running."""
    replicas, others = dict(box.replicas), dict(moving)
    for runner, step in steps:
        holder = step.move.holder
        others.pop(holder, None)
        if step.verb != "drain_replica":
            continue
        if holder.id in replicas:
            replicas[holder.id] = runner.before.replicas[holder.id]
        for take in runner.waiting_for(holder):
            transition = others.pop(take.holder, None)
            if transition is not None and transition.moves > 1:  # the holder's move that leaves devices continues
                others[take.holder] = Transition(transition.moves - 1)
    return replace(box, replicas=replicas), others
