"""Runs the training loop: steps, and between them everything else (validate, snapshot, publish, stop).

    for each step:  what it learns from (train.run.feed) -> micro-batches -> optimizer step
                    -> one tiny all-reduce (loss and signals) -> act on the signals

The all-reduce makes all ranks see the same signals at the same step boundary, so they suspend, cancel or snapshot
together without any other coordination. When the devices are requested, all ranks leave the current step at one point
(train.run.leave_step), and the same all-reduce follows.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from runtime.devices.kinds import kind_of
from train.control.progress import SIGNALS, ControlSignals, Events, Progress
from train.control.rank_messages import broadcast_json
from train.control.stop_point import StopPoint
from train.data.packing import StepPlan
from train.data.token_set import TokenSet
from train.methods.methods import method_of
from train.plan.errors import TrainingDiverged
from train.plan.learning_rate import learning_rate
from train.plan.spec import TrainSpec
from train.plan.spikes import Anomaly, LossWatch, history
from train.plan.stragglers import RankTimes
from train.rollouts.rollouts import Rollouts
from train.run.engine import accumulation_steps
from train.run.event_log import EventLog, read_events
from train.run.feed import DataFeed, Feed
from train.run.forward_time import ForwardTime
from train.run.leave_step import Leaving, StepLeft
from train.run.profiling import Profiling
from train.run.reference import Reference
from train.run.tensorboard_writer import TensorboardWriter
from train.run.validations import Validations
from train.state import fragments, parking, snapshot
from train.state.saving import Saving
from weights.memory.store import WeightStore

_VALIDATES_ON_S = 5.0  # a shorter validation is not left; a suspension waits for its end
_PACED_SHARE = 0.5  # of a step's time, over which a copy beside it is spread


class LeftForSnapshot(RuntimeError):
    """The run continues from its last snapshot in another world, without what this one has computed since."""


class Run:
    """Runs one rank's part of a job, from an engine in memory to an outcome.

    Build it with `train.run.prepare`, then `run`. Events are those of the contract in `train.control.group`.
    """

    def __init__(
        self,
        spec: TrainSpec,
        store: WeightStore,
        engine: Any,
        train: TokenSet,
        valid: TokenSet | None,
        emit: Events,
        signals: ControlSignals,
        progress: Progress,
    ):
        self.spec, self.store, self.engine = spec, store, engine
        self.method = method_of(spec.method)
        self.train, self.valid = train, valid
        self.grid = fragments.grid(engine)
        self.rank, self.world_size = self.grid.rank, self.grid.world_size
        self.lifeline_events = emit
        self.emit = EventLog(spec.run_dir, emit) if self.rank == 0 else lambda event, **data: None
        self.signals, self.progress = signals, progress
        self.step = 0
        self._resumed_from: str | None = None
        self._pace_s = 0.0
        self.boundary_s = 0.0  # time.monotonic() when all ranks had ended or left the last step
        self.reference = Reference(self.method, spec, engine, {"train": train, "valid": valid}, self.emit, progress)
        self.plan, self.feed = self._steps()
        self.rollouts = None
        if self.method.rolls_out:
            self.rollouts = Rollouts(
                spec, self.method, engine, store, self.grid, self.plan, (train, valid), emit, signals, progress
            )
            self.feed = self.rollouts
        self.saving = Saving(spec, store, engine, self.plan, self.emit, signals, progress)
        stop = StopPoint(Path(spec.run_dir), self.rank, self.world_size)
        if self.rank == 0:
            stop.reset()  # no rank begins a step before the first all-reduce of `run`
        self.leaving = Leaving(engine, stop, spec.step_patience_s)
        # Only on rank 0, only if something depends on them, and only once the first step of the run is known.
        self._validations: Validations | None = None
        self._ends_early = False
        self._losses = LossWatch(spec.on_loss_spike, spec.rate_cuts)
        on_host = kind_of(spec.device_kind).on_host
        self._forward_time, self._rank_times = ForwardTime(None if on_host else engine.device), RankTimes()
        self._board = TensorboardWriter(Path(spec.run_dir) / "tb") if self.rank == 0 else None
        self._profiling = Profiling(
            Path(spec.run_dir) / "profile",
            kind_of(spec.device_kind).collectives,
            self.emit,
            progress,
            accumulation_steps(spec, self.world_size),
        )

    def _steps(self) -> tuple[StepPlan, Feed]:
        """What each step learns from. The data is ordered by the starting model's loss, and packed anew, only once that
        loss is known: no step is done or planned before."""
        spec, train = self.spec, self.train
        if spec.data_order == "loss" and self.reference.complete:
            train.order_by_loss()
        shuffled = spec.data_order == "shuffled"
        plan = StepPlan(len(train.packs), spec.batch_size, spec.micro_batch, spec.n_epochs, spec.seed, shuffled)
        return plan, DataFeed(self.method, plan, train, self.grid)

    def resume_from(self, path: str) -> None:
        """Collective: take the state of a snapshot. Raises SnapshotMismatch."""
        self.progress.enter("resuming")
        store = snapshot.store_of(path, self.store, self.spec)
        self.step = snapshot.read_snapshot(self.engine, self.spec, store, path)
        self.reference.take_from(store, path)
        self._resumed_from = path

    def run(self) -> dict[str, Any]:
        """Train to the end or until a signal; return the outcome for the final event. Call `close` afterwards."""
        self._begin()
        signals = self._learn_reference()
        if signals["suspend"]:
            return self._suspend(0)
        if signals["cancel"] and not self.reference.complete:
            return self._cancelled()
        self.saving.kept = self.reference.kept()
        if self.spec.data_order == "loss":
            self.plan, self.feed = self._steps()
            self.saving.steps = self.plan
        if self.step == 0:
            self._validate()
            self._say_how_often_it_validates()
        if self._is_best():  # an earlier world may have been about to finish or to publish
            self._publish_best()
        while not self._is_over():
            signals = self._next_step()
            if self._is_over():
                break
            if signals["cancel"]:
                self.saving.finish()
                self.saving.drop_reserved()
                return self._cancelled()
            if signals["suspend"]:
                return self._suspend(signals["draft"])
            if signals["snapshot"]:
                self.saving.snapshot_if_room(self.step, signals["draft"], self._pace_s)
        self._profiling.end(self.step)
        self.saving.drop_reserved()
        if not self._best_is_published():
            self.saving.publish_result(self.step)
        self.saving.wait()
        return {"outcome": "succeeded", "step": self.step}

    def _begin(self) -> None:
        self.saving.began_at = self.step
        if self.rank == 0 and self.spec.follows_validations:
            self._validations = Validations(self.spec.run_dir, self.step)
        known = history(read_events(self.spec.run_dir), self.step) if self.rank == 0 else None
        spec = self.spec
        self._losses = LossWatch(
            spec.on_loss_spike, spec.rate_cuts, broadcast_json(known), start=self.step, older=spec.older_snapshots
        )
        self.leaving.at(self.step)

    def _learn_reference(self) -> dict[str, Any]:
        """Collective: what the starting model says of the data, until it is known or a signal comes; returns that."""
        signals, self.boundary_s = self._agreed(), time.monotonic()
        if self.rank == 0:
            self.signals.listen(self.leaving.ask)
        while not signals["suspend"] and not signals["cancel"] and self.reference.learn_some():
            signals, self.boundary_s = self._agreed(), time.monotonic()
        self.reference.save()
        return signals

    def _is_over(self) -> bool:
        return self._ends_early or self.step >= self.plan.total_steps

    def _next_step(self) -> dict[str, Any]:
        """Collective: does the next step, or leaves it because its devices are wanted; returns the signals."""
        if not self.feed.ready(self.step):
            self.saving.foresee(self.step)
            signals, self.boundary_s = self._agreed(), time.monotonic()
            return signals
        try:
            signals = self._one_step(self.plan.total_steps)
        except StepLeft:
            signals = {}
        if not signals:  # outside the handler, because the exception holds the tensors of the step
            return self._leave_step()
        self.boundary_s = time.monotonic()
        self._after_step()
        return signals

    def _after_step(self) -> None:
        self.saving.finish()
        self.saving.make_first_room()
        best_here = False
        if self.plan.validates(self.step, self.spec.eval_interval, self.spec.most_validations):
            self._validate()
            best_here = self._is_best()
        if self._is_over():
            return  # it is published as the result
        if best_here:
            self._publish_best()
        elif self.spec.publishes_epochs and self.step in self.plan.epoch_end_steps():
            self.saving.publish_if_room(self.step, self._pace_s)

    def _cancelled(self) -> dict[str, Any]:
        return {"outcome": "cancelled", "step": self.step}

    def close(self) -> None:
        """Write out what is buffered for TensorBoard: the process may end without any of Python's own clean-up."""
        self._profiling.drop()
        self.leaving.close()
        if self._board is not None:
            self._board.close()

    def _one_step(self, total: int) -> dict[str, Any]:
        self._profiling.before_step(self.signals.take_profile())
        started = time.perf_counter()
        spec, step = self.spec, self.step
        scale = 1.0 / self.feed.denominator()
        rate = learning_rate(
            step, total, peak=spec.learning_rate, warmup_ratio=spec.warmup_ratio, schedule=spec.lr_scheduler
        )
        rate *= self._losses.rate(step)
        for group in self.engine.optimizer.optimizer.param_groups:
            group["lr"] = rate

        loss = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        with self._profiling.reading_input():
            rows = self.feed.rows()
        self._forget_measured()
        self._forward_time.begin_step()
        self.leaving.begin()
        for turn, (number, row) in enumerate(rows, 1):
            self.progress.enter("step", step)
            self.leaving.point()
            self._profiling.before_row()
            self.saving.foresee(step + 1)
            # Dropout depends on the micro-batch, not on the rank that computes it or on what ran before.
            torch.manual_seed(hash((spec.seed, step, number)) & 0x7FFF_FFFF)
            with self._profiling.reading_input():
                batch = self.method.batch(row, scale * row.weight, self.engine.device)
            with self._forward_time.measured():
                part = self.engine(batch)
            # Use a separate tensor: on the engine's own output DeepSpeed 0.19.8 divides by the accumulation steps even
            # if told not to (its hook there runs before it detects its own backward).
            self.engine.backward(part * 1, scale_wrt_gas=False)
            loss += part.detach()
            if turn == len(rows):
                self.leaving.point()
                self.leaving.stay()
                self.saving.copied()  # from here on the state has changed
            self.saving.foresee(step + 1)
            self.engine.step()
        self.step += 1
        self.leaving.end()
        self._pace_s = _PACED_SHARE * (time.perf_counter() - started)
        agreed = self._agree_and_report(loss, rate, total, started)
        self._profiling.after_step(self.step)
        return agreed

    def _forget_measured(self) -> None:
        """Forgets what a step that was left may have counted."""
        for forget in (self.method.hits, self.method.metrics, self.method.peaks):
            forget(self.engine.module)

    def _leave_step(self) -> dict[str, Any]:
        """Collective: leave the current step; return the requested signal."""
        self._profiling.drop()
        lost_s = self.leaving.forget()
        self.emit(
            "message",
            level="info",
            text=(
                f"step {self.step + 1} was left after {lost_s:.1f} s because its devices are wanted; it will be "
                "done again"
            ),
        )
        self.saving.foresee(self.step)
        agreed, self.boundary_s = self._agreed(), time.monotonic()
        return agreed

    def _agree_and_report(self, loss: torch.Tensor, rate: float, total: int, started: float) -> dict[str, Any]:
        self.saving.foresee(self.step)
        agreed = self._agreed(loss)
        grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
        found = self._losses.look(self.step, agreed["loss"], grad_norm)
        if found is not None and found.kind == "not_finite":
            self._act_on(found)
        if self.rank == 0:
            tokens, seconds = self.feed.tokens(), self.feed.seconds()
            training_s = time.perf_counter() - started
            timing = {**seconds, "training": training_s, "full_iteration": training_s + sum(seconds.values())}
            metrics = {
                "loss": agreed["loss"],
                "grad_norm": grad_norm,
                "learning_rate": rate,
                "tokens_per_s": tokens / timing["full_iteration"],
                **agreed["metrics"],
                **self.feed.step_metrics(),
            }
            self._board.write("train", self.step, metrics)
            self.emit(
                "metrics",
                at_s=round(time.time(), 3),
                step=self.step,
                total_steps=total,
                devices=self.world_size,
                tokens=tokens,
                epoch=min(self.spec.n_epochs, self.step * self.spec.batch_size / len(self.train.packs)),
                **metrics,
                rank_seconds=[round(one, 4) for one in agreed["rank_seconds"]],
                **({"timing": {"step": timing}} if seconds else {}),
            )
            slow = self._rank_times.look(self.step, agreed["rank_seconds"])
            if slow is not None:
                self.emit("straggler", **asdict(slow))
        if found is not None and found.kind == "spike":
            self._act_on(found)
        return agreed

    def _act_on(self, found: Anomaly) -> None:
        """All ranks found the same anomaly and call this. The controller pauses the job and remembers the new learning
        rate. Raises TrainingDiverged or LeftForSnapshot, which end this world: nothing that the step wrote is kept."""
        data = asdict(found) | {"loss": _number(found.loss), "grad_norm": _number(found.grad_norm)}
        self.emit("anomaly", text=found.text, **data)
        if found.action == "fail":
            raise TrainingDiverged(found.step, found.loss, found.grad_norm, len(found.cuts))
        if found.action == "rollback" or found.kind == "not_finite":
            raise LeftForSnapshot(found.text)

    def _agreed(self, loss: torch.Tensor | None = None) -> dict[str, Any]:
        """Collective: returns the signals sent to any rank by name, "loss" (over all ranks), "metrics" (the method's),
        "rank_seconds" (what each rank computed by itself), and "draft": the number of rank 0's draft for the snapshot
        of this step, 0 if none."""
        signals = asdict(self.signals)
        reserved = self.saving.reserved(self.step)
        # The other ranks of a tensor parallel group have the same values.
        measured = [0.0] * (2 + len(self.method.metric_names))
        if loss is not None and self.grid.tensor_rank == 0:
            measured = [*self.method.hits(self.engine.module), *self.method.metrics(self.engine.module)]
        sent_for = [float(signals[name]) for name in SIGNALS]
        took = [0.0] * self.world_size
        took[self.rank] = self._forward_time.seconds() if loss is not None else 0.0
        message = torch.tensor([0.0, reserved, *sent_for, *measured, *took], device=self.engine.device)
        if loss is not None and self.grid.tensor_rank == 0:
            message[0] = loss
        comm.all_reduce(message)
        total, draft, *sent = message.tolist()
        found = {name: count > 0 for name, count in zip(SIGNALS, sent[: len(SIGNALS)], strict=True)}
        names, (hits, learnt, *rest) = self.method.metric_names, sent[len(SIGNALS) :]
        metrics = _accuracy(hits, learnt) | dict(zip(names, rest[: len(names)], strict=True))
        if loss is not None and self.method.peak_names:
            peaks = torch.tensor(self.method.peaks(self.engine.module), device=self.engine.device)
            comm.all_reduce(peaks, op=comm.ReduceOp.MAX)
            metrics |= dict(zip(self.method.peak_names, peaks.tolist(), strict=True))
        return {"loss": total, "draft": int(draft), "metrics": metrics, "rank_seconds": rest[len(names) :]} | found

    def _say_how_often_it_validates(self) -> None:
        wanted, most = self.spec.eval_interval, self.spec.most_validations
        apart = self.plan.apart(wanted, most)
        if apart > wanted:
            text = f"validations are {apart} steps apart, not {wanted} (eval_interval): publish=best has at most {most}"
            self.emit("message", level="warn", text=text)

    def _is_best(self) -> bool:
        """Collective: whether this step is the best so far; it also sees whether the run ends here because it has not
        become better for long enough."""
        if not self.spec.follows_validations:
            return False
        patience, known = self.spec.early_stopping_patience, self._validations
        best, since = broadcast_json([known.best_step, known.since_best] if known is not None else None)
        self._ends_early = 0 < patience <= since and self.step < self.plan.total_steps
        if self._ends_early:
            text = (
                f"training ends at step {self.step} of {self.plan.total_steps}: the last {since} validations were not "
                f"better than that of step {best} (early_stopping_patience {patience})"
            )
            self.emit("message", level="info", text=text)
        return bool(best == self.step > 0)

    def _publish_best(self) -> None:
        """Collective. The result, unless a later step is better."""
        if self.spec.publish == "best":
            self.saving.publish_if_room(self.step, self._pace_s)

    def _best_is_published(self) -> bool:
        """Collective: whether the result is a version that was published before."""
        if self.spec.publish != "best":
            return False
        known = self._validations
        best = known.best_step if known is not None else 0
        there = known is not None and 0 < best < self.step and known.published(best)
        if there:
            text = f"the result is the version of step {best}, whose validation was the best"
            self.emit("message", level="info", text=text)
        elif 0 < best < self.step:
            text = f"the result is the version of step {self.step}: that of step {best}, the best, was not published"
            self.emit("message", level="warn", text=text)
        return bool(broadcast_json(there))

    def _validate(self) -> None:
        if self.valid is None:
            return
        if self.rollouts is not None:
            self._tell_validation(self.rollouts.validate(self.step))
            return
        packs = np.arange(len(self.valid.packs))
        scale = 1.0 / self.method.denominator(self.valid, packs)
        # The loss, the tokens that were the likeliest and all of them, then the metrics of the method.
        totals = torch.zeros(3 + len(self.method.metric_names), dtype=torch.float32, device=self.engine.device)
        self._forget_measured()
        self.engine.eval()
        # Every rank runs equally many forwards: under ZeRO-3 each of them is a collective.
        turns, began_s, left = -(-len(packs) // self.grid.data_size), time.monotonic(), False
        for turn in range(turns):
            if left := self._leaves_validation((time.monotonic() - began_s) / max(1, turn) * (turns - turn)):
                break
            self.progress.enter("validating")  # for each row: a whole file may take longer than the limit for a hang
            index = turn * self.grid.data_size + self.grid.data_rank
            with torch.no_grad():
                row = self.valid.row(packs[[index % len(packs)]])
                part = self.engine(self.method.batch(row, scale, self.engine.device))
            metrics = [*self.method.hits(self.engine.module), *self.method.metrics(self.engine.module)]
            if index < len(packs) and self.grid.tensor_rank == 0:
                totals += torch.tensor([part.item(), *metrics], device=totals.device)
        self.engine.train()
        if left:
            return self._tell_validation(None)
        comm.all_reduce(totals)
        loss, hits, learnt, *metrics = totals.tolist()
        named = zip(self.method.metric_names, metrics, strict=True)
        self._tell_validation({"loss": loss, **_accuracy(hits, learnt), **dict(named)})

    def _leaves_validation(self, left_s: float) -> bool:
        """Collective: whether the devices are wanted, and this validation would still take long, which rank 0 says."""
        wanted = self.rank == 0 and (self.signals.suspend or self.signals.cancel) and left_s > _VALIDATES_ON_S
        message = torch.tensor(float(wanted), device=self.engine.device)
        comm.all_reduce(message)
        return bool(message)

    def _tell_validation(self, found: dict[str, float] | None) -> None:
        """Report a validation. None: the devices were wanted before its end, and its curve lacks this point."""
        if found is None:
            return
        if self.rank == 0:
            self._board.write("validation", self.step, found)
        if self._validations is not None:
            self._validations.add(self.step, found)
        self.emit("validation", step=self.step, total_steps=self.plan.total_steps, **found)

    def _suspend(self, draft: int) -> dict[str, Any]:
        """Collective: write the state to shared memory, unless it has not changed since this run began."""
        path, nbytes, seconds = self._resumed_from, 0, 0.0
        if self.step == self.saving.began_at:
            self.saving.drop_reserved()
            self.saving.give_back()
        else:
            written = self.saving.suspend(self.step, draft)
            path, nbytes, seconds = written.path, written.bytes, written.seconds
        return {
            "outcome": "suspended",
            "step": self.step,
            "snapshot_path": path,
            "bytes": nbytes,
            "seconds": {"snapshot": seconds},
            "parked": parking.can_park(self.spec),
        }


def _number(value: float) -> float | None:
    """The value if it is finite, as JSON requires; else None."""
    return value if math.isfinite(value) else None


def _accuracy(hits: float, learnt: float) -> dict[str, float]:
    """The share of the tokens to be learnt that were the likeliest ones."""
    return {"mean_token_accuracy": hits / learnt} if learnt else {}
