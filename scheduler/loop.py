"""The one owner of the scheduler's state: look, plan, act, again.

Level-triggered: every round reads the workload from the store, plans for what is, and starts the chains that lead from
what is to what should be. Nothing depends on having seen an event; events and nudges only make the next round come
sooner. Holders that a hand-over is moving are left alone until their chains have ended; all others are planned anew,
so a slow step of one holder does not delay the rest.

After a crash a new loop observes the world, closes what the journal left open, and goes on with rounds: what was half
done is finished or taken back because the plan says so, not because a record says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import replace
from typing import Any

from scheduler import call_off, tidal, view
from scheduler import handover as ho
from scheduler.call_off import Drain
from scheduler.config import SchedulerConfig
from scheduler.effects import (
    DeviceFailed,
    Effects,
    Event,
    GroupEnded,
    InventoryChanged,
    Observed,
    ReplicaDied,
)
from scheduler.errors import EffectFailed, Stopped
from scheduler.explain import explain, mode_of, reason_of
from scheduler.failures import Failures
from scheduler.handover import Box, Chain, Handover, Step
from scheduler.inventory import Holder, Ledger
from scheduler.journal import HandoverRecord, Journal
from scheduler.plan import Allocation, plan
from scheduler.ports import Clock, StateStore
from scheduler.queue import places
from scheduler.runner import ChainEnd, Runner
from scheduler.view import Moving
from scheduler.workload import ModelMemory, Policy, ReplicaView, Snapshot, Workload

log = logging.getLogger(__name__)


class SchedulerLoop:
    """Owns box, failures and planner memory; everything runs on one asyncio loop, so there are no locks.

    `run` ends only by `stop`, cancellation, or an error that is a bug (then the process should restart: the truth is
    outside of it).
    """

    def __init__(
        self,
        effects: Effects,
        state_store: StateStore,
        journal: Journal,
        clock: Clock,
        config: SchedulerConfig | None = None,
    ):
        self._effects, self._store, self._journal, self._clock = effects, state_store, journal, clock
        self._config = config or SchedulerConfig()
        self.box = Box(devices={}, ledger=Ledger(()))
        self._failures = Failures(self._config)
        self._failed_devices: dict[str, str] = {}
        self._memory: dict[str, ModelMemory] = {}
        self._moving: dict[Holder, Moving] = {}
        self._drains: dict[Holder, Drain] = {}
        self._events: deque[Event] = deque()
        self._ended: dict[str, GroupEnded] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[int, Runner] = {}
        self._interrupted: tuple[HandoverRecord, ...] = ()
        self._workload = Workload(Policy())
        self._in_force = tidal.InForce(Policy(), 0.0, None, None)
        self._settings: tuple[Any, ...] = ()
        self._allocation = Allocation()
        self._told: dict[str, tuple[str, bool]] = {}
        self._wake = asyncio.Event()
        self._generation = self._settled = 0
        self._round_done = asyncio.Condition()
        self._look_again_s = 0.0
        self._plan_s = 0.0
        self._stopping = False
        self._crash: BaseException | None = None

    # --- from outside -------------------------------------------------------------------------------------------

    def nudge(self) -> int:
        """Something changed in the store or in the demand: plan soon. Answers the generation for `wait_settled`."""
        self._generation += 1
        self._wake.set()
        return self._generation

    async def wait_settled(self, generation: int) -> None:
        """Until a round that began after this nudge found nothing left to do and no hand-over under way.

        Jobs and models that wait out a failure count as settled. Raises Stopped when the loop ends first.
        """
        async with self._round_done:
            await self._round_done.wait_for(lambda: self._settled >= generation or self._stopping)
            if self._settled < generation:
                raise Stopped("the scheduler loop ended before it settled; its process's log says why")

    def stop(self) -> None:
        """End `run` after the steps in flight were cancelled. The next loop goes on from what is."""
        self._stopping = True
        self._wake.set()

    def forgive(self, model: str) -> None:
        """Try a model again that was given up on."""
        self._failures.forget_model(model)
        self.nudge()

    def status(self) -> dict[str, Any]:
        """What is, what is under way, and why jobs wait; plain values for JSON."""
        snapshot = self._snapshot()
        queue = places(snapshot.jobs, self._clock.now_s())
        return {
            **view.status(self.box, snapshot, self._allocation, self._in_force, queue),
            "handovers": sorted(self._running),
            "generation": self._generation,
            "settled": self._settled,
            "plan_s": self._plan_s,
        }

    def explain(self, policy: Policy | None = None) -> dict[str, Any]:
        """What a round would do now under this policy (None: the one in force), and why. Nothing is done."""
        snapshot = self._snapshot(policy)
        allocation = plan(snapshot, self._clock.now_s(), self._config)
        return explain(self._steps(snapshot, allocation), allocation, snapshot)

    # --- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Adopt what is there, then round after round until stopped."""
        pump: asyncio.Task[None] | None = None
        try:
            await self._adopt()
            pump = asyncio.create_task(self._pump())
            pump.add_done_callback(self._task_done)
            while not self._stopping:
                self._wake.clear()
                if self._crash is not None:
                    raise self._crash
                generation = self._generation
                self._take_events()
                if self._clock.now_s() >= self._look_again_s:
                    await self._observe()
                if not self._round() and not self._moving and not self._running and not self._events:
                    await self._settle(generation)
                await self._pause()
        finally:
            self._stopping = True
            for task in [*self._tasks, *([pump] if pump else [])]:
                task.cancel()
            await asyncio.gather(*self._tasks, *([pump] if pump else []), return_exceptions=True)
            async with self._round_done:
                self._round_done.notify_all()

    async def _adopt(self) -> None:
        """Start from the truth; hand-overs that a crash interrupted are judged once the box is settled again."""
        self._interrupted = self._journal.unfinished()
        attempt = 0
        while True:
            try:
                observed = await self._effects.observe()
                break
            except EffectFailed as error:
                attempt += 1
                log.warning("the box cannot be observed yet (%s)", error)
                await asyncio.sleep(self._failures.backoff_s(attempt))
        self._merge(observed, frozenset())
        self._look_again_s = self._clock.now_s() + self._config.observe_every_s

    async def _observe(self) -> None:
        busy = frozenset(self._moving)
        self._look_again_s = self._clock.now_s() + self._config.observe_every_s
        try:
            observed = await self._effects.observe()
        except EffectFailed as error:
            log.warning("the box cannot be observed (%s)", error)
            self._look_again_s = self._clock.now_s() + self._config.backoff_first_s
            return
        self._merge(observed, busy | frozenset(self._moving))

    def _merge(self, observed: Observed, busy: frozenset[Holder]) -> None:
        """Take over the truth for every holder but those whose chains changed them while it was read."""
        now_s, old = self._clock.now_s(), self.box
        truth = Box.of(observed, now_s)
        replicas = dict(truth.replicas)
        # "ended" means ended and told to the store: the events below tell those that were not.
        groups = {job_id: replace(group, ended=False) for job_id, group in truth.groups.items()}
        for replica in old.replicas.values():
            seen = replicas.get(replica.id)
            if Holder("replica", replica.id) in busy:
                replicas[replica.id] = replica
            elif seen is None and replica.awake:
                replicas[replica.id] = self._dead(replica, "its process is gone")
            elif seen is not None and seen.state == replica.state:
                replicas[replica.id] = replace(seen, since_s=replica.since_s)
            elif seen is not None and seen.state == "dead":
                replicas[replica.id] = self._dead(replica, "its process died")
        for group in old.groups.values():
            if Holder("job", group.job_id) in busy:
                groups[group.job_id] = group
            elif group.job_id in groups:
                groups[group.job_id] = replace(group, ended=group.ended, devices=groups[group.job_id].devices)
        for holder in busy:
            if holder.kind == "replica" and holder.id not in old.replicas:
                replicas.pop(holder.id, None)
            if holder.kind == "job" and holder.id not in old.groups:
                groups.pop(holder.id, None)
        ledger = Ledger(truth.devices)
        ledger = ledger.resized([*truth.devices, *(d for le in old.ledger if le.holder in busy for d in le.device_ids)])
        ledger = ledger.acquire(*(le for le in old.ledger if le.holder in busy))
        ledger = ledger.acquire(*(le for le in truth.ledger if le.holder not in busy))
        self.box = Box(truth.devices, ledger, replicas, groups)
        self._events.extend(g.ended for g in observed.groups if g.ended is not None)
        self._take_events()

    async def _pump(self) -> None:
        while True:
            event = await self._effects.next_event()
            self._events.append(event)
            self._wake.set()

    def _take_events(self) -> None:
        """Apply every event whose holder is not being moved; the others wait for their chain to end."""
        later: list[Event] = []
        while self._events:
            event = self._events.popleft()
            match event:
                case ReplicaDied(replica_id, reason):
                    if Holder("replica", replica_id) in self._moving:
                        later.append(event)
                    elif (replica := self.box.replicas.get(replica_id)) is not None and replica.state != "dead":
                        self._put(self._dead(replica, reason))
                case GroupEnded():
                    if Holder("job", event.job_id) in self._moving:
                        self._ended[event.job_id] = event
                        later.append(event)
                    else:
                        self._ended.pop(event.job_id, None)
                        self._group_ended(event)
                case DeviceFailed(device_id, reason):
                    self._failed_devices[device_id] = reason
                case InventoryChanged():
                    self._failed_devices.clear()
                    self._look_again_s = 0.0
        self._events.extend(later)

    def _put(self, replica: ReplicaView) -> None:
        self.box = replace(self.box, replicas={**self.box.replicas, replica.id: replica})

    def _dead(self, replica: ReplicaView, reason: str) -> ReplicaView:
        """The replica as dead, its failure counted."""
        now_s = self._clock.now_s()
        stable = replica.state == "open" and now_s - replica.since_s >= self._config.replica_stable_s
        self._model_failed(replica.model, replica.version, f"replica {replica.id} died: {reason}", afresh=stable)
        return replace(replica, state="dead", since_s=now_s)

    def _model_failed(
        self, model: str, version: str, reason: str, *, counted: bool = True, afresh: bool = False
    ) -> None:
        failure = self._failures.model_failed(
            model, version, reason, self._clock.now_s(), counted=counted, afresh=afresh
        )
        log.warning("%s; failure %d", reason, failure.count, extra={"model": model, "version": version})
        if failure.given_up:
            self._store.deployment_failed(model, version, reason)

    def _group_ended(self, event: GroupEnded) -> None:
        group = self.box.groups.get(event.job_id)
        lease = self.box.ledger.of(Holder("job", event.job_id))
        if group is not None and (group.ended or (lease is not None and lease.id != event.lease_id)):
            return  # told already, or about an incarnation before this one
        if group is not None:
            self.box = replace(
                self.box, groups={**self.box.groups, group.job_id: replace(group, ended=True)}
            )
        if event.outcome == "failed" and event.retryable:
            self._job_failed(event.job_id, event.step, event.error)
        else:
            self._job_over(event.job_id, event.outcome, event.error)

    def _job_failed(self, job_id: str, step: int, error: str, *, counted: bool = True) -> None:
        failure = self._failures.job_failed(job_id, step, error, self._clock.now_s(), counted=counted)
        if failure.given_up:
            tries = self._config.job_attempts
            self._job_over(job_id, "failed", f"{error} (failed {tries} times without a step of progress)")
            return
        log.warning("%s; failure %d", error, failure.count, extra={"job_id": job_id})

    def _job_over(self, job_id: str, outcome: Any, error: str) -> None:
        self._store.job_ended(job_id, outcome, error)
        self._failures.forget_job(job_id)
        self._told.pop(job_id, None)

    # --- one round ----------------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """Plan and start what leads there. True when a hand-over was started."""
        self._workload = self._store.load()
        now_s = self._clock.now_s()
        self._tide(now_s)
        for replica in self.box.replicas.values():
            if replica.state == "open" and now_s - replica.since_s >= self._config.replica_stable_s:
                self._failures.model_stable(replica.model, replica.version)
        self._call_off_drains(now_s)
        snapshot = self._snapshot()
        began_s = time.perf_counter()
        self._allocation = plan(snapshot, now_s, self._config)
        self._plan_s = time.perf_counter() - began_s
        self._memory = self._allocation.memory
        handover = self._steps(snapshot, self._allocation)
        self._tell_waiting(snapshot)
        if not handover.chains:
            return False
        self._launch(handover, reason_of(handover, snapshot.policy))
        return True

    def _steps(self, snapshot: Snapshot, allocation: Allocation) -> Handover:
        known = {j.id for j in snapshot.jobs}
        return ho.steps(
            self.box,
            allocation,
            snapshot.epoch,
            busy=self._moving.keys(),
            over={j for j in self.box.groups if j not in known},
            forced={
                j
                for j in self.box.groups
                if self._failures.chain_failures(f"free job {j}") >= self._config.suspend_attempts
            },
        )

    def _tide(self, now_s: float) -> None:
        """The policy in force; looked up again when the store's settings change or a window fires."""
        settings = (self._workload.windows, self._workload.policy, self._workload.policy_since_s)
        fired = self._in_force.until_s is not None and self._in_force.until_s <= now_s
        if settings != self._settings or fired:
            self._settings = settings
            self._in_force = tidal.in_force(*settings, now_s)

    def _call_off_drains(self, now_s: float) -> None:
        """Take back the drains that would not be begun now; see call_off.py."""
        runners = {h: runner for runner in self._running.values() for h in runner.draining if h in self._drains}
        policy = self._in_force.policy
        drains = call_off.worth_asking((self._drains[h] for h in runners), policy, self._workload)
        if not drains:
            return
        box, moving = call_off.as_if_not_begun(self.box, self._moving, drains)
        wanted = plan(self._snapshot(box=box, moving=moving), now_s, self._config)
        for drain in call_off.to_call_off(drains, wanted):
            runners[drain.holder].call_off(drain.holder, f"{mode_of(policy)} keeps replica {drain.replica.id} open")
            self._moving[drain.holder].target = drain.replica.devices

    def _launch(self, handover: Handover, reason: str) -> None:
        self._drains |= call_off.drains_of(handover, self.box, self._in_force.policy, self._workload)
        for chain in handover.chains:
            moving = self._moving.setdefault(chain.holder, Moving(0, (), None))
            moving.chains += 1
            if chain.side == "take":
                moving.target, moving.take = chain.devices, chain
            elif chain.side == "swap":
                moving.target = self.box.replicas[chain.holder.id].devices
        runner = Runner(
            handover,
            reason,
            owner=self,
            effects=self._effects,
            journal=self._journal,
            clock=self._clock,
            config=self._config,
        )
        runner.begin()
        self._running[handover.id] = runner
        task = asyncio.create_task(runner.run(), name=f"handover {handover.id}")
        self._tasks.add(task)
        task.add_done_callback(lambda t: (self._running.pop(handover.id, None), self._task_done(t)))

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = self._crash or task.exception()
        self._wake.set()

    # --- what the runner reports --------------------------------------------------------------------------------

    def called_off(self, chain: Chain) -> str:
        if chain.holder.kind == "job" and chain.side == "take" and chain.holder.id in self._ended:
            return "the job ended by itself meanwhile"
        return ""

    def step_done(self, step: Step) -> None:
        if step.verb == "start_group" and step.lease is not None:
            self._told.pop(step.target, None)
            self._store.job_running(step.target, step.lease.device_ids)

    def chain_ended(self, end: ChainEnd) -> None:
        chain, holder = end.chain, end.chain.holder
        self._drains.pop(holder, None)
        if end.state in ("done", "skipped", "called_off"):
            if end.state == "done":
                self._failures.chain_done(chain.name)
            if end.state == "skipped" and chain.side == "take":
                self._moving[holder].target, self._moving[holder].take = (), None
            self._unhand(holder)
            return
        self._look_again_s = 0.0
        if chain.side == "free":
            if holder.kind == "replica":
                self._moving[holder].target = ()  # it was to stay after all, and could not
            wait_s = self._failures.chain_failed(chain.name)
            ids = {"job_id" if holder.kind == "job" else "replica": holder.id}
            log.warning("%s failed, next try in %.1f s: %s", chain.name, wait_s, end.error, extra=ids)
            asyncio.get_running_loop().call_later(wait_s, self._try_again, holder)
            return
        counted = end.failed_step is None or end.failed_step.verb != "acquire"
        if holder.kind == "job":
            self._job_failed(holder.id, -1, end.error, counted=counted)
        else:
            rise = next(s for s in chain.steps if s.version or s.verb == "open_replica")
            model = rise.model or self.box.replicas[holder.id].model
            version = rise.version or self.box.replicas[holder.id].version
            self._model_failed(model, version, end.error, counted=counted)
        self._unhand(holder)

    def _try_again(self, holder: Holder) -> None:
        """Look first: what was read while the holder was in hand was not taken over, so an engine that went with the
        failed step was drained again for ever."""
        self._look_again_s = 0.0
        self._unhand(holder)

    def _unhand(self, holder: Holder) -> None:
        moving = self._moving[holder]
        moving.chains -= 1
        if moving.chains == 0:
            del self._moving[holder]
        self._wake.set()

    def _snapshot(
        self, policy: Policy | None = None, *, box: Box | None = None, moving: dict[Holder, Moving] | None = None
    ) -> Snapshot:
        return view.snapshot(
            self.box if box is None else box,
            self._moving if moving is None else moving,
            self._workload,
            self._failures,
            self._failed_devices,
            policy=policy or self._in_force.policy,
            memory=self._memory,
            epoch=self._journal.last_id() + 1,
            now_s=self._clock.now_s(),
        )

    # --- telling ------------------------------------------------------------------------------------------------

    def _tell_waiting(self, snapshot: Snapshot) -> None:
        """Tell the store why jobs wait, once per change of the sentence or phase."""
        for job in snapshot.jobs:
            reason = self._allocation.waiting.get(job.id)
            if reason is None or job.id in self.box.groups or job.busy == "coming":
                continue
            word = (reason, job.phase == "suspended")
            said = self._told.get(job.id)
            counting_down = job.not_before_s > self._clock.now_s() and said is not None
            if said != word and not counting_down:
                self._told[job.id] = word
                self._store.job_waiting(job.id, reason, job.phase == "suspended")

    async def _settle(self, generation: int) -> None:
        for record in self._interrupted:
            reached = all(
                ho.holds(s.verb, s.target, str(s.detail.get("version", "")), self.box)
                for s in {s.target: s for s in record.steps if s.undoes is None and s.state != "skipped"}.values()
            )
            self._journal.end(
                record.id,
                "done" if reached else "undone",
                self._clock.now_s(),
                "interrupted by a restart of the controller",
            )
        self._interrupted = ()
        self._settled = max(self._settled, generation)
        async with self._round_done:
            self._round_done.notify_all()

    async def _pause(self) -> None:
        """Until a nudge, an event, the end of a chain, or the time to look again."""
        known = (self._look_again_s, self._allocation.review_at_s, self._in_force.until_s)
        times = [t for t in known if t is not None]
        wait_s = max(min(times) - self._clock.now_s(), 0.001)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
