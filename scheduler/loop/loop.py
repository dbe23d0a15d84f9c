"""The scheduler's control loop: observe, plan, act, repeat. Only the loop changes the scheduler's state.

Level-triggered: every round reads the workload from the store, plans for the current state, and starts the moves that
lead from it to the wanted state. No round depends on having seen an event; events and nudges only start the next round
sooner. A round leaves holders alone while a hand-over moves them and replans all others, so a slow step of one holder
does not delay the rest.

After a crash a new loop observes the world, closes the open journal records, and continues with rounds: the plan, not
the journal, decides whether unfinished work is finished or undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler.core.config import SchedulerConfig
from scheduler.core.errors import EffectFailed, Stopped
from scheduler.core.failures import Failure, first_line, reverts_to
from scheduler.core.workload import CORDONED, Allocation, Build, Holder, PlanInput, Policy, Workload, node_of
from scheduler.handover import handover
from scheduler.handover.effects import Box, Detail, Effects, Journal, StateStore
from scheduler.handover.handover import Move, MoveState, Runner
from scheduler.loop import cluster_state, explain, mode_schedule
from scheduler.plan.plan import plan

log = logging.getLogger(__name__)

LONG_START_S = 60.0
"""After this long a start of ranks gives way as a running job would. The limit doubles per retry, up to four times:
little work of a cancelled start is kept, and a start that always gave way would never finish."""
USUAL_PAUSE_S = 2.25
"""Seconds of suspending and starting ranks in a change of size that costs `job_pause_s`. The rest (the repeated step,
leases, the wait for engines) shows in no step."""


class SchedulerLoop(cluster_state.ClusterState):
    """Owns the observed state and the planner's hysteresis, and runs on one asyncio loop without locks.

    `run` ends only by `stop`, cancellation, or an error that is a bug (then restart the process: the real state is
    elsewhere).
    """

    def __init__(
        self,
        effects: Effects,
        store: StateStore,
        journal: Journal,
        *,
        inbox: cluster_state.Inbox | None = None,
        clock: Callable[[], float] = time.time,
        config: SchedulerConfig | None = None,
        book_engine: Callable[[str, str], bool] = lambda model, node: True,
        too_large: Callable[[str], str] = lambda model: "",
    ):
        """book_engine: True if this node's host has memory for one more engine of this model. The loop calls it before
        each start and wake, and again in the next round after a refusal. too_large: returns "", or a sentence if no
        host can ever have the memory for an engine of this model, which counts as the model's failure."""
        super().__init__(effects, clock, config or SchedulerConfig(), store)
        self._journal, self._inbox = journal, inbox or cluster_state.Inbox()
        self._book_engine, self._too_large = book_engine, too_large
        self._reasons: dict[str, tuple[str, bool]] = {}
        self._troubles: dict[str, Failure] = {}
        self._wake, self.nudge, self.retry = self._inbox.changed, self._inbox.nudge, self._inbox.retry
        self._transitions: dict[Holder, cluster_state.Transition] = {}
        self._suspended_s: dict[str, float] = {}  # by job: seconds that its last suspend took
        self._pauses_s: dict[str, float] = {}  # by job: seconds that its last change of size cost on each device
        self._gave_way: Counter[str] = Counter()  # by job: number of its starts that were cancelled in favour of others
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, Runner] = {}
        self._workload = Workload(Policy())
        self._in_force = mode_schedule.InForce(Policy(), 0.0, None, None)
        self._window_since_s = 0.0
        self._settings: tuple[Any, ...] = ()
        self._usable: frozenset[str] = frozenset()
        self._allocation = Allocation()
        self._settled = 0
        self._adopted = False
        self._round_done = asyncio.Condition()
        self._plan_s = 0.0
        self._stopping = False
        self._crash: BaseException | None = None

    # --- for callers --------------------------------------------------------------------------------------------

    async def wait_settled(self, generation: int) -> None:
        """Return once a round that began after this nudge found nothing to do and no hand-over in progress.

        Jobs and models in backoff count as settled. Raises Stopped if the loop ends first.
        """
        await self._rounds_until(lambda: self._settled >= generation)

    async def next_handover(self, generation: int) -> int | None:
        """Return the id of the next hand-over to begin; None if the loop settles without a hand-over. Raises Stopped if
        the loop ends first."""
        before = self._journal.last_id()
        await self._rounds_until(lambda: self._settled >= generation or self._journal.last_id() > before)
        return before + 1 if self._journal.last_id() > before else None

    async def _rounds_until(self, holds: Callable[[], bool]) -> None:
        async with self._round_done:
            await self._round_done.wait_for(lambda: holds() or self._stopping)
        if not holds():
            raise Stopped("the scheduler loop has ended; see the controller's log for the cause")

    def stop(self) -> None:
        """End `run` after cancelling the steps in flight. The next loop continues from the observed state."""
        self._stopping = True
        self._wake.set()

    def reset_failures(self, model: str) -> None:
        """End the backoff of a changed model whose engines failed."""
        self.failures.models.pop(model, None)
        self.nudge()

    def trouble(self, model: str, version: str) -> Failure | None:
        """Return the failure that keeps engines of this version from starting; None if none does."""
        return self.failures.model(model, version)

    def status(self) -> dict[str, Any]:
        """Return the state, hand-overs in progress and why jobs wait, as values for JSON."""
        plan_input = self._plan_input()
        now_s = self._clock()
        return {
            **explain.status(self.box, plan_input, self._allocation, self._in_force, now_s),
            "troubles": [
                explain.trouble(deployment.model, failure, self.box.replicas.values(), now_s)
                for deployment in plan_input.deployments
                if (failure := self.trouble(deployment.model, deployment.version)) is not None
            ],
            "waits": [
                explain.waits_for(step, now_s)
                for runner in self._running.values()
                for step in runner.running_steps
                if now_s - step.since_s >= self._config.slow_step_s
            ],
            "handovers": sorted(self._running),
            "plan_s": self._plan_s,
        }

    def explain(self, policy: Policy | None = None) -> dict[str, Any]:
        """Return the actions and reasons of a round under this policy (None: the current policy). Changes nothing."""
        plan_input = self._plan_input(policy)
        now_s = self._clock()
        allocation = plan(plan_input, now_s, self._config)
        explanation = explain.explain(self._moves(plan_input, allocation), allocation, plan_input, now_s)
        steps = (step for runner in self._running.values() for step in runner.running_steps)
        return {**explanation, "under_way": [explain.waits_for(step, now_s) for step in steps]}

    # --- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Adopt the current state, then run rounds until stopped."""
        pump: asyncio.Task[None] | None = None
        try:
            await self.adopt()
            pump = asyncio.create_task(self._pump())
            pump.add_done_callback(self._task_done)
            while not self._stopping:
                self._wake.clear()
                if self._crash is not None:
                    raise self._crash
                generation = self._inbox.generation
                while self._clock() >= self.observe_again_s:  # repeated if a move ended during the reading
                    await self.observe(self._transitions)
                if not self._round() and not self._transitions and not self._running:
                    self._settled = max(self._settled, generation)
                async with self._round_done:
                    self._round_done.notify_all()
                await self._pause()
        finally:
            self._stopping = True
            for task in [*self._tasks, *([pump] if pump else [])]:
                task.cancel()
            await asyncio.gather(*self._tasks, *([pump] if pump else []), return_exceptions=True)
            async with self._round_done:
                self._round_done.notify_all()

    async def adopt(self) -> None:
        """Observe the world, and close hand-overs that a crash interrupted; the plan continues from the observed state.

        `run` calls it unless it was called before. Call it before routes answer: until then `status` has no devices,
        and a job checked against that status would fail for lack of memory."""
        if self._adopted:
            return
        for handover_id in self._journal.unfinished():
            self._journal.end(handover_id, "undone", self._clock(), "interrupted by a restart of the controller")
        attempt = 0
        while not await self.observe(self._transitions):
            attempt += 1
            await asyncio.sleep(self.failures.backoff_s(attempt))
        self._adopted = True

    async def _pump(self) -> None:
        while True:
            await self._effects.changed()
            self.observe_again_s = 0.0
            self._wake.set()

    # --- one round ----------------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """Plan and start the resulting moves. True if it started a hand-over, or has to plan again."""
        moves, handover_id = self._planned(), self._journal.last_id() + 1
        if not moves:
            return moves is None
        for move in moves:
            moving = self._transitions.setdefault(move.holder, cluster_state.Transition())
            moving.moves += 1
            if move.side == "take":
                moving.target, moving.take = move.devices, move
                if move.holder.kind == "job":
                    answering = {d for r in self.box.replicas.values() if r.awake for d in r.devices}
                    self._store.job_coming(move.holder.id, move.devices, len(answering & set(move.devices)))
            elif move.side == "swap":
                moving.target = move.devices
        policy, reason = self._in_force.policy, explain.reason_of(moves, self._in_force.policy)
        self._journal.begin(handover_id, reason, self._clock(), *self._requested())  # recorded before the first step
        runner = self._running[handover_id] = Runner(
            handover_id, moves, self, self._effects, self._journal, self._clock, self._config, policy, self._workload
        )
        tasks = [asyncio.create_task(runner.carry_out(move), name=f"{handover_id}: {move.name}") for move in moves]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._task_done)
        return True

    def _planned(self) -> tuple[Move, ...] | None:
        """Return the moves that lead from the current to the wanted state; None if the loop must plan again at once."""
        self._workload = self._store.load(free_devices=len(self.box.devices.keys() - self.box.holders.keys()))
        now_s = self._clock()
        for cause in self._inbox.take_resolved():
            self.failures.retry(cause)
        self._take_policy_in_force(now_s)
        self.clear_failures_of_stable_replicas()
        for d in self._workload.deployments:  # a restarted controller reads them, to revert to what served last
            if d.served not in (None, d.build) and self._serves(d.model, d.build):
                self._store.model_served(d.model, d.build)
        self._cancel_steps(now_s)
        self.failures.keep(self._workload)
        self._report_troubles()
        for known in (self._suspended_s, self._pauses_s, self._gave_way):
            for job_id in known.keys() - {job.id for job in self._workload.jobs}:
                del known[job_id]
        plan_input = self._plan_input()
        before, self._usable = self._usable, frozenset(d.id for d in plan_input.devices if d.usable)
        if before and not self._usable <= before:
            self.failures.retry("device")
            plan_input = self._plan_input()
        began_s = time.perf_counter()
        self._allocation = plan(plan_input, now_s, self._config)
        self._plan_s = time.perf_counter() - began_s
        moves = self._moves(plan_input, self._allocation)
        if self._fail_too_large(moves):
            self._wake.set()  # plan again without this engine, before a holder releases devices for it
            return None
        self._report_waiting(plan_input, now_s)
        return tuple(
            move
            for move in moves
            if move.side != "take" or move.plan is None or self._book_engine(move.plan.model, node_of(move.devices[0]))
        )

    def _report_troubles(self) -> None:
        """Report failing models to the store, once per change."""
        before, self._troubles = self._troubles, {m: replace(f) for m, f in self.failures.models.items()}
        for model in sorted(before.keys() | self._troubles.keys()):
            if before.get(model) != (now := self._troubles.get(model)):
                self._store.model_trouble(model, now)

    def _report_waiting(self, plan_input: PlanInput, now_s: float) -> None:
        """Report to the store why each job waits, once per change of the reason or of the job's phase."""
        before, self._reasons = self._reasons, {}
        for job in plan_input.jobs:
            reason = self._allocation.waiting.get(job.id)
            if reason is None or job.id in self.box.groups or job.busy == "coming":
                continue
            counts_down = job.id in before and job.not_before_s > now_s
            current = before[job.id] if counts_down else (reason, job.phase == "suspended")
            if before.get(job.id) != current:
                self._store.job_waiting(job.id, reason)
            self._reasons[job.id] = current

    def _fail_too_large(self, moves: tuple[Move, ...]) -> bool:
        """Fail the starts of engines that need more memory than any host has; False if there are none. Without a
        failure, requests would be held until they time out, and no user would see why."""
        reasons = {
            (plan.model, plan.build): why
            for move in moves
            if move.side == "take" and (plan := move.plan) is not None and (why := self._too_large(plan.model))
        }
        for (model, build), why in reasons.items():
            self._start_failed(model, build, EffectFailed(why, "input", of_settings=True))
        return bool(reasons)

    def _serves(self, model: str, build: Build) -> bool:
        """Whether an open engine of the model was started with this build."""
        return any(("open", model, build) == (r.state, r.model, r.build) for r in self.box.replicas.values())

    def _start_failed(self, model: str, build: Build, failure: EffectFailed) -> None:
        """Record that an engine did not start. If only the settings can be at fault, and no other engine serves with
        them, restore the settings that served last; engines with the restored settings then get the held requests."""
        deployment = next((d for d in self._workload.deployments if d.model == model), None)
        served = None
        if deployment is not None and failure.of_settings and not self._serves(model, build):
            served = reverts_to(deployment, build)
        if served is not None and self._store.settings_failed(model, build, served, first_line(failure.reason)):
            log.warning("reverted to the settings that served before: %s", failure.reason, extra={"model": model})
            self.failures.models.pop(model, None)
        elif deployment is None or deployment.settings == build.settings:
            now_s = self._clock()
            self.failures.model_failed(model, build.version, failure.reason, now_s, blame=failure.blame, at_start=True)
        self._wake.set()  # the retry may use other settings

    def _moves(self, plan_input: PlanInput, allocation: Allocation) -> tuple[Move, ...]:
        return handover.moves(
            self.box,
            allocation,
            busy=self._transitions.keys(),
            over=self.box.groups.keys() - {job.id for job in plan_input.jobs},
            forced={
                j for j in self.box.groups if self.failures.moves[f"free job {j}"] >= self._config.suspend_attempts
            },
        )

    def _take_policy_in_force(self, now_s: float) -> None:
        """Evaluate the policy in force anew when the store's settings change or a window begins or ends."""
        settings = (self._workload.windows, self._workload.policy, self._workload.policy_since_s)
        fired = self._in_force.until_s is not None and self._in_force.until_s <= now_s
        if settings != self._settings or fired:
            self._settings = settings
            self._in_force = mode_schedule.in_force(*settings, now_s)

    def _cancel_steps(self, now_s: float) -> None:
        """Cancel starts of jobs that should not run any more, and steps that the loop would not begin now.

        A drain may take long, because the engine answers its requests before it sleeps. Until then the engine can be
        reopened at no cost, so a reversed mode or new requests need not wait for a sleep and a wake. Ranks may load
        their model for minutes: a long start gives way like a running job. To decide, the planner plans as if these
        steps had not begun."""
        policy, doubtful = self._in_force.policy, []
        runs = {job.id for job in self._workload.jobs if job.phase != "paused"}
        steps = [(runner, step) for runner in self._running.values() for step in runner.running_steps]
        for runner, step in steps:
            if step.verb == "start_group" and step.move.holder.id not in runs:
                runner.cancel(step, "the job should not run any more")
            elif step.verb == "start_group":
                patience_s = LONG_START_S * 2 ** min(self._gave_way[step.move.holder.id], 2)
                if now_s - step.since_s >= min(patience_s, self._config.start_group_timeout_s):
                    doubtful.append((runner, step))
            elif step.verb == "drain_replica" and cluster_state.is_doubtful_drain(runner, step, policy, self._workload):
                doubtful.append((runner, step))
        if not doubtful:
            return
        box, moving = cluster_state.as_if_not_begun(self.box, self._transitions, doubtful)
        wanted = plan(self._plan_input(box=box, moving=moving), now_s, self._config)
        stays = {(replica.id, replica.devices) for replica in wanted.open_replicas}
        for runner, step in doubtful:
            holder = step.move.holder
            if holder.kind == "job":
                if not set(step.move.devices).issubset(wanted.groups.get(holder.id, ())):
                    runner.cancel(step, "another holder needs its devices, and its ranks take long to prepare")
                    self._gave_way[holder.id] += 1
            elif (holder.id, devices := runner.before.replicas[holder.id].devices) in stays:
                runner.cancel(step, f"{explain.mode_of(policy)} keeps replica {holder.id} open")
                self._transitions[holder].target = devices

    def _requested(self) -> tuple[str, str]:
        """Return requester (name of a key, "box", "window <id>" or "scheduler") and request of the hand-over that
        begins now."""
        if (request := self._inbox.newest_request(self._settled)) is not None:
            return request
        now = self._in_force
        if now.window is not None and now.since_s != self._window_since_s:
            # The window causes only its first hand-over; demand and the queue cause later hand-overs.
            self._window_since_s = now.since_s
            return f"window {now.window.id}", f"mode {now.policy.kind}"
        return "scheduler", "demand and queue"

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running = {number: runner for number, runner in self._running.items() if not runner.ended}
        if not task.cancelled() and task.exception() is not None:
            self._crash = self._crash or task.exception()
        self._wake.set()

    # --- reports of the runner ----------------------------------------------------------------------------------

    def unwanted(self, move: Move) -> bool:
        return self._transitions[move.holder].over

    def step_done(self, move: Move, verb: str, took_s: float, detail: Detail) -> None:
        self._transitions[move.holder].over = verb == "suspend_group" and "ended" in (detail or {})
        job_id = move.holder.id
        if verb == "suspend_group":
            self._suspended_s[job_id] = took_s
        elif verb == "start_group":
            if (suspended_s := self._suspended_s.pop(job_id, None)) is not None:
                pause_s = suspended_s + took_s + self._config.job_pause_s - USUAL_PAUSE_S
                self._pauses_s[job_id] = max(pause_s, 0.1)
            self._store.job_running(job_id, move.devices)

    def move_ended(self, move: Move, state: MoveState, failure: EffectFailed | None) -> None:
        holder = move.holder
        if state != "done" or holder in self._discarded or self._transitions[holder].over:
            self.observe_again_s = 0.0
        if failure is None:  # done, skipped or cancelled
            if state == "done":
                self.failures.moves.pop(move.name, None)
            elif move.side == "take":
                self._transitions[holder].target, self._transitions[holder].take = (), None
            self._clear_in_progress(holder)
            return
        if move.side == "free":
            if holder.kind == "replica":
                self._transitions[holder].target = ()  # a cancelled drain keeps its devices; a failed drain does not
            self.failures.moves[move.name] += 1
            wait_s = self.failures.backoff_s(self.failures.moves[move.name])
            ids = {"job_id" if holder.kind == "job" else "replica": holder.id}
            log.warning("%s failed, next try in %.1f s: %s", move.name, wait_s, failure.reason, extra=ids)
            asyncio.get_running_loop().call_later(wait_s, self._try_again, holder)
            return
        if move.plan is None:
            self.job_failed(holder.id, -1, failure.reason, blame=failure.blame)
        else:
            model, version = move.plan.model, move.plan.version
            if move.how == "start":
                self._start_failed(model, move.plan.build, failure)
            elif failure.blame == "version":
                self.version_refused(model, version, failure.reason)
            else:
                now_s = self._clock()
                self.failures.model_failed(model, version, failure.reason, now_s, blame=failure.blame)
        self._clear_in_progress(holder)

    def _try_again(self, holder: Holder) -> None:
        """Let the loop observe the holder, and retry. Observations are discarded during a hand-over, so without this
        call an engine that died in the failed step would be drained forever."""
        self.observe_again_s = 0.0
        self._clear_in_progress(holder)

    def _clear_in_progress(self, holder: Holder) -> None:
        moving = self._transitions[holder]
        moving.moves -= 1
        if moving.moves == 0:
            del self._transitions[holder]
        self._wake.set()

    def _plan_input(
        self,
        policy: Policy | None = None,
        *,
        box: Box | None = None,
        moving: dict[Holder, cluster_state.Transition] | None = None,
    ) -> PlanInput:
        """Return the planner's input: the current state, with every moving holder at its target."""
        box, moving = box or self.box, self._transitions if moving is None else moving
        busy = {d for m in moving.values() for d in m.target}
        busy |= {d for d, holder in box.holders.items() if holder in moving}
        workload = self._workload
        return PlanInput(
            policy=policy or self._in_force.policy,
            devices=tuple(
                replace(d, health="draining", health_reason=CORDONED)
                if d.health == "ok" and not workload.cordoned.isdisjoint((d.id, d.uuid))
                else d
                for d in box.devices.values()
            ),
            jobs=tuple(cluster_state.job_view(j, box, moving, self.failures, self._pauses_s) for j in workload.jobs),
            deployments=tuple(
                replace(d, failed=failure.reason, not_before_s=failure.not_before_s)
                if (failure := self.trouble(d.model, d.version)) is not None
                else d
                for d in workload.deployments
            ),
            replicas=tuple(cluster_state.replica_views(box, moving, self._clock())),
            busy_devices=frozenset(busy),
            hysteresis=self._allocation.hysteresis,
            handover_id=self._journal.last_id() + 1,
            max_asleep=workload.max_asleep,
        )

    # --- waiting ------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Wait for a nudge, an event, the end of a move, or the next observation time."""
        times = (self.observe_again_s, self._allocation.review_at_s, self._in_force.until_s)
        wait_s = max(min(t for t in times if t is not None) - self._clock(), 0.001)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
