"""The training loop: data, step, save, publish, stop. `Run.run` is the whole loop, `Run.train_step` one step.

Every rank runs this. Before each step and each micro-batch the ranks agree over the host whether any of them was asked
to leave (train.control.rank); then all of them raise DevicesWanted at the same point. A step is a pure function of the
seed and its number: an aborted step is repeated, and only time is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.rank import DevicesWanted, Rank, any_rank
from train.data.packing import Row, StepData, StepPlan, part_of
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.methods.methods import method_of
from train.methods.packed_objective import to_batch
from train.model.tensor_parallel import Grid
from train.plan.errors import TrainingDiverged
from train.plan.spec import learning_rate
from train.rollouts.rollouts import Rollouts
from train.state.publish import publish_step
from train.state.snapshot import Snapshots, Validations
from train.trainer.metrics import Metrics
from weights.format.errors import StoreFull
from weights.format.names import replace_file

KEPT_S = 60.0
"""The first step of a world is not aborted before this time, so that a job makes progress however often its devices
are taken."""
_KEPT_VALIDATION_S = 5.0  # a validation is not aborted before this time


def equal_shares(count: int, grid: Grid) -> range:
    """Return the numbers of the rows that this rank evaluates, equally many on every rank, because under ZeRO-3 each
    forward pass is a collective. Numbers from `count` on are padding."""
    return range(grid.data_rank, -(-count // grid.data_size) * grid.data_size, grid.data_size)


class DataFeed:
    """Provides the rows of the data for each step of a rank. Rollouts (train.rollouts.rollouts) have the same
    interface, for answers that engines sample from the trained model."""

    def __init__(self, method: Method, plan: StepPlan, tokens: TokenSet, grid: Grid, sequence_parallel: int = 1):
        """sequence_parallel: number of neighbouring ranks that share a row; each has a part of its tokens."""
        self._method, self._plan, self._tokens, self._grid = method, plan, tokens, grid
        self._parts = sequence_parallel

    def step(self, step: int) -> StepData:
        """This rank's rows of the step after `step` steps."""
        group, part = divmod(self._grid.data_rank, self._parts)
        micro_batches = self._plan.micro_batches(step, group, self._grid.data_size // self._parts)
        rows = [(number, part_of(self._row(step, number, packs), part, self._parts)) for number, packs in micro_batches]
        counted = self._plan.learnt_in_step(step)
        return StepData(rows, self._method.denominator(self._tokens, counted), self._tokens.tokens_in(counted))

    def _row(self, step: int, number: int, packs: np.ndarray) -> Row:
        counted = packs[: max(0, self._plan.counted(step) - number * len(packs))]
        return self._tokens.row(counted) if len(counted) else replace(self._tokens.row(packs), weight=0.0)


class Reference:
    """Log-probabilities that the starting model gives every sequence of the data, for methods that compare the trained
    model with it (Method.needs_reference). They are computed once, before the first step: until then the model is the
    starting model (a new adapter adds nothing), so no second copy of the weights is needed.

    values: (examples, sequences) float32, NaN where unknown; the token set has them as `reference`. The ranks share the
    packs and sum their values. A file in `<run_dir>/reference`, named by the digest of the tokens, lets an aborted pass
    resume; every snapshot has them too, for a run that resumes on another machine.
    """

    def __init__(self, rank: Rank, tokens: TokenSet):
        self._rank, self._tokens = rank, tokens
        self._path = Path(rank.spec.run_dir) / "reference" / tokens.digest
        self.values = tokens.reference = np.full((tokens.n_examples, tokens.sequences), np.nan, np.float32)
        # After a power cut the file may be empty.
        if self._path.exists() and (known := np.fromfile(self._path, np.float32)).size == self.values.size:
            self.values[:] = known.reshape(self.values.shape)

    def compute(self, evaluated: Callable[..., Iterator[tuple[dict[str, Any], torch.Tensor]]]) -> None:
        """Collective: compute the unknown values. The engine must have the starting model's weights.
        evaluated: `Run._evaluated`. Raises DevicesWanted; a later run resumes from the values known by then."""
        tokens, grid, began_s, done = self._tokens, self._rank.grid, time.monotonic(), 0
        unknown = [n for n, members in enumerate(tokens.packs) if np.isnan(self.values[members]).any()]
        if not unknown:
            return
        places = equal_shares(len(unknown), grid)
        packs = [unknown[min(place, len(unknown) - 1)] for place in places]
        rows = ((tokens.row(np.array([pack])), 1.0) for pack in packs)
        known = torch.zeros(self.values.shape, dtype=torch.float32, device=self._rank.engine.device)
        try:
            results = evaluated("reference", rows, 0.0, as_reference=True)
            for place, pack, (_, log_probs) in zip(places, packs, results, strict=True):
                if place < len(unknown) and grid.tensor_rank == 0:
                    known[tokens.packs[pack]] = log_probs.view(-1, tokens.sequences)
                done += grid.data_size
        except DevicesWanted:
            if done:
                self._add(known, unknown[:done])
            raise
        self._add(known, unknown)
        text = f"reference log-probabilities of {tokens.n_examples} examples were computed in "
        self._rank.emit("message", level="info", text=f"{text}{time.monotonic() - began_s:.1f} s")

    def _add(self, known: torch.Tensor, packs: list[int]) -> None:
        """Collective: sum the ranks' values of these packs and store the sums."""
        comm.all_reduce(known)
        if not known.isfinite().all():
            raise TrainingDiverged(0, known.sum().item(), 0.0)
        members = np.concatenate([self._tokens.packs[pack] for pack in packs])
        self.values[members] = known.cpu().numpy()[members]
        self.keep()

    def keep(self) -> None:
        """Write the values into the job's directory."""
        if self._rank.grid.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, self.values.tobytes())


class Run:
    """Runs one rank's part of a job, from an engine in memory to an outcome.

    Build it with `train.trainer.worker.prepare`, then `run`. Events are those of the contract in `train.control.group`.
    """

    def __init__(self, rank: Rank, train: TokenSet, valid: TokenSet | None):
        spec = rank.spec
        self.rank, self.spec, self.engine, self.grid, self.progress = rank, spec, rank.engine, rank.grid, rank.progress
        self.train, self.valid = train, valid
        self.method = method_of(spec.method)
        self.step = self.first_step = 0
        self.ended_s = 0.0  # time.monotonic() when the training ended
        self._resumed_from: str | None = None
        self.validations = Validations()
        sets = {"train": train, "valid": valid} if self.method.needs_reference else {}
        self.references = {
            f"reference.{name}": Reference(rank, tokens) for name, tokens in sets.items() if tokens is not None
        }
        kept = {name: torch.from_numpy(reference.values) for name, reference in self.references.items()}
        self.snapshots = Snapshots(rank, train.digest, self.validations, kept)
        self.plan = StepPlan(len(train.packs), spec.batch_size, spec.micro_batch, spec.n_epochs, spec.seed)
        self.feed: DataFeed | Rollouts = DataFeed(self.method, self.plan, train, self.grid, spec.sequence_parallel)
        self.rollouts = None
        if self.method.rolls_out:
            self.feed = self.rollouts = Rollouts(rank, self.method, self.plan, train)
        self.metrics = Metrics(rank, self.method)

    def resume_from(self, path: str) -> None:
        """Collective: load the state from a snapshot. Raises SnapshotMismatch."""
        self.progress.enter("resuming")
        self.step = self.first_step = self.snapshots.read(path)
        for reference in self.references.values():
            reference.keep()
        self._resumed_from = path

    def run(self) -> dict[str, Any]:
        """Train to the end, or until the devices are wanted; return the fields of the event "done". Call
        `metrics.close` afterwards."""
        try:
            self._train()
        except DevicesWanted:
            self.ended_s = time.monotonic()
            return self._suspended()
        self._publish_result()
        self.ended_s = time.monotonic()
        return {"outcome": "succeeded", "step": self.step}

    def _train(self) -> None:
        """Collective. Raises DevicesWanted."""
        for reference in self.references.values():
            reference.compute(self._evaluated)
        # A validation by rollouts may have been aborted here; its answers may have arrived since.
        if self.step == 0 or (self.rollouts is not None and self._validates()):
            self._validate()
        self._publish()  # an earlier world may have left just before it published
        while not self._is_over():
            if self._agree(self.step > self.first_step and self.snapshots.due()):
                self.snapshots.save(self.step)
            self.train_step()
            if self._validates():
                self._validate()
            if not self._is_over():  # the last step is published as the result
                self._publish()

    def train_step(self) -> None:
        """Collective: do the next step, all micro-batches and the optimizer's update. Raises DevicesWanted if it is
        aborted: only gradients have changed by then, and the process is about to end."""
        spec, step, engine = self.spec, self.step, self.engine
        loss = self.metrics.begin()
        data = self.feed.step(step)
        total, warmup_ratio = self.plan.total_steps, spec.warmup_ratio
        rate = learning_rate(
            step, total, peak=spec.learning_rate, warmup_ratio=warmup_ratio, schedule=spec.lr_scheduler
        )
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = rate
        until_s = time.monotonic() + (KEPT_S if step == self.first_step else 0.0)
        scale = 1.0 / data.denominator  # the global step's, so that gradients and losses of micro-batches add up
        shared = self._divergence("step", ((row, scale * row.weight) for _, row in data.rows), until_s)
        for number, row in data.rows:
            self._abort_if_wanted("step", until_s)
            # Dropout must depend on the micro-batch alone, not on its rank or on earlier micro-batches.
            torch.manual_seed(hash((spec.seed, step, number)) & 0x7FFF_FFFF)
            batch = to_batch(row, scale * row.weight, engine.device) | shared
            self.metrics.forward_timer.start()
            part = engine(batch)
            self.metrics.forward_timer.stop()
            # Pass a new tensor: DeepSpeed 0.19.8 divides the engine's own output by the accumulation steps even with
            # scale_wrt_gas=False (its hook on that tensor runs before it detects its own backward pass).
            engine.backward(part * 1, scale_wrt_gas=False)
            loss += part.detach()
            engine.step()  # the optimizer steps after the last micro-batch only
        self.step += 1
        fields = {"total_steps": total, "epoch": min(spec.n_epochs, self._epoch()), "learning_rate": rate}
        self.metrics.end_step(self.step, loss, data, **fields)

    def _evaluated(
        self, phase: str, rows: Iterable[tuple[Row, float]], until_s: float, **more: Any
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Collective: yield the batch of each row with the engine's result, without gradients. Raises DevicesWanted.

        Args:
            rows: (row, scale) pairs, equally many on every rank: under ZeRO-3 each forward pass is a collective.
            until_s: time.monotonic() before which the pass is not aborted.
            more: further items of every batch.
        """
        self.engine.eval()
        try:
            for row, scale in rows:
                self._abort_if_wanted(phase, until_s)
                batch = to_batch(row, scale, self.engine.device) | more
                with torch.no_grad():
                    result = self.engine(batch)
                yield batch, result
        finally:
            self.engine.train()

    def _divergence(self, phase: str, rows: Iterable[tuple[Row, float]], until_s: float) -> dict[str, torch.Tensor]:
        """Collective: {"divergence": sum over the rows of all ranks} for methods that need it, else {}. Raises
        DevicesWanted."""
        if not self.method.needs_divergence:
            return {}
        total = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        for batch, log_probs in self._evaluated(phase, rows, until_s, as_reference=True):
            total += (log_probs - batch["reference"]).sum() * batch["scale"]
        if self.grid.tensor_rank:  # the other ranks of its group have the same value
            total.zero_()
        comm.all_reduce(total)
        return {"divergence": total}

    # --- leaving the devices

    def _agree(self, due: bool = False) -> bool:
        """Collective: the first rank's `due`, on every rank. Raises DevicesWanted."""
        wanted, due = any_rank(self.progress.suspend, due and self.grid.rank == 0)
        if wanted:
            raise DevicesWanted
        return due

    def _abort_if_wanted(self, phase: str, until_s: float) -> None:
        """Collective, before each micro-batch: raise DevicesWanted if a rank was asked to leave, after `until_s`."""
        self.progress.enter(phase, self.step)  # a whole file may take longer than the limit for a hang
        if any_rank(self.progress.suspend and time.monotonic() > until_s)[0]:
            if phase == "step":
                text = f"step {self.step + 1} was aborted because its devices are wanted; it will be repeated"
                self.rank.emit("message", level="info", text=text)
            raise DevicesWanted

    def _suspended(self) -> dict[str, Any]:
        """Collective: write a snapshot and return the outcome of a run that leaves its devices."""
        path, nbytes, seconds = self._resumed_from, 0, 0.0
        if self.step > self.first_step:  # without a step, nothing has changed since the run began
            written = self.snapshots.suspend(self.step)
            path, nbytes, seconds = written.path, written.bytes, written.seconds
        return {
            "outcome": "suspended",
            "step": self.step,
            "snapshot_path": path,
            "bytes": nbytes,
            "seconds": {"snapshot": seconds},
        }

    # --- validations and versions

    def _is_over(self) -> bool:
        return self._ends_early or self.step >= self.plan.total_steps

    @property
    def _ends_early(self) -> bool:
        return 0 < self.spec.early_stopping_patience <= self.validations.since_best

    def _epoch(self) -> float:
        return self.step * self.spec.batch_size / len(self.train.packs)

    def _validates(self) -> bool:
        return self.plan.validates(self.step, self.spec.eval_interval)

    def _publish(self) -> None:
        """Collective: publish this step if it ends an epoch, or has the best validation, as `spec.publish` says."""
        spec = self.spec
        of_epoch = spec.publishes_epochs and self.step in self.plan.epoch_end_steps() and self.step > self.first_step
        is_best = spec.publish == "best" and self.validations.best_step == self.step > 0
        due = (of_epoch or is_best) and self.step not in self.validations.published
        if not due:
            return
        try:
            publish_step(self.rank, self.step, self._epoch())
            self.validations.published.append(self.step)
        except StoreFull as error:  # training continues: the last step has a version of its own
            text = f"the version of step {self.step}, epoch {self._epoch():.3g}, is not published: {error}"
            self.rank.emit("message", level="warn", text=text)

    def _publish_result(self) -> None:
        """Collective: publish the last step, unless the result is an earlier version. Raises StoreFull after writing
        the state to disk: hours of work must not be lost for lack of memory. A later start then only publishes."""
        if not self._best_is_published():
            try:
                publish_step(self.rank, self.step, self._epoch())
            except StoreFull:
                self.snapshots.save_on_disk(self.step)
                raise

    def _validate(self) -> None:
        """Collective: validate and report the scores. If the devices are wanted meanwhile, this point is left out."""
        if self.valid is None:
            return
        try:
            scores = self.rollouts.validate(self.step) if self.rollouts is not None else self._validation(self.valid)
        except DevicesWanted:
            return
        self.validations.add(self.step, scores)
        self.metrics.report_validation(self.step, self.plan.total_steps, scores)

    def _validation(self, valid: TokenSet) -> dict[str, float]:
        packs = np.arange(len(valid.packs))
        shares = equal_shares(len(packs), self.grid)
        until_s, scale = time.monotonic() + _KEPT_VALIDATION_S, 1.0 / self.method.denominator(valid, packs)

        def rows() -> Iterator[tuple[Row, float]]:
            return ((valid.row(packs[[n % len(packs)]]), scale * (n < len(packs))) for n in shares)

        shared = self._divergence("validating", rows(), until_s)
        loss = self.metrics.begin()
        for _, part in self._evaluated("validating", rows(), until_s, **shared):
            loss += part
        return self.metrics.end_validation(loss)

    def _best_is_published(self) -> bool:
        """Whether the result is an earlier, published version; reports which version is the result."""
        best = self.validations.best_step
        if self._ends_early and self.step < self.plan.total_steps:
            text = (
                f"training ends at step {self.step} of {self.plan.total_steps}: the last {self.validations.since_best} "
                f"validations were not better than the one at step {best} (early_stopping_patience "
                f"{self.spec.early_stopping_patience})"
            )
            self.rank.emit("message", level="info", text=text)
        if self.spec.publish != "best" or not 0 < best < self.step:
            return False
        if is_published := best in self.validations.published:
            text = f"the result is the version of step {best}, which had the best validation"
        else:
            text = f"the result is the version of step {self.step}: step {best} was the best but was not published"
        self.rank.emit("message", level="info" if is_published else "warn", text=text)
        return is_published
