"""Snapshots of a run: its state by parameter in shared memory. Each rank writes its fragments; a world of any size and
any tensor-parallel size can read it.

For every trained parameter a snapshot has `master.<name>`, `exp_avg.<name>` and `exp_avg_sq.<name>`, whole, float32, in
the parameter's shape; also tensors that the run computed at its beginning; and in its meta the step, the scores of
validations, and the reports of the newest steps. Position in the data, order, learning rate and random streams are
functions of the step and the spec, so nothing else is stored.

Training waits while a snapshot is written, so it is written only as often as that is cheap (train.plan.spec.every_s).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from train.control.rank import Rank
from train.plan.errors import SnapshotMismatch
from train.plan.spec import every_s
from train.state import copies, fragments
from train.state.copies import Piece, Written, write_together
from train.state.fragments import Fragment
from weights.format.errors import IntegrityError, StoreError, StoreFull
from weights.format.layout import Layout, TensorSpec
from weights.format.names import version_name
from weights.format.torch_views import Strided
from weights.memory.lease import StoredVersion, take_lease
from weights.memory.store import Draft, WeightStore

KIND = "snapshot"
PARTS = ("master", *fragments.MOMENTS)
# Spec fields that must equal the snapshot's for a run to resume from it.
_IDENTITY = ("seed", "batch_size", "micro_batch", "max_length", "packing", "n_epochs", "full", "lora_rank")
_GUESSED_BYTES_S = 1e9  # assumed rate of one rank until the first snapshot is measured


@dataclass
class Validations:
    """Scores of a run's validations by step, and the steps whose versions it has published.

    Snapshots have them, so that a run which repeats steps also forgets the validations of those steps.
    """

    scores: dict[int, float] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)

    def add(self, step: int, results: dict[str, Any]) -> None:
        """Add the score of a validation: its mean reward if it has one, else minus its loss."""
        if step > 0:  # at step 0 the weights are the starting model's
            score = results["mean_reward"] if "mean_reward" in results else -results["loss"]
            self.scores[step] = score if math.isfinite(score) else -sys.float_info.max

    @property
    def best_step(self) -> int:
        """The step of the best validation, the first of equally good ones; 0 if there was none."""
        return max(self.scores, key=lambda step: (self.scores[step], -step), default=0)

    @property
    def since_best(self) -> int:
        """Number of validations since the best validation."""
        return sum(step > self.best_step for step in self.scores)


class Snapshots:
    """One rank's part in the run's snapshots. All methods but `due` are collective.

    tokens: digest of the training data's tokens. kept: float32 host tensors by name, equal on every rank, that every
    snapshot contains.
    """

    def __init__(self, rank: Rank, tokens: str, validations: Validations, kept: Mapping[str, torch.Tensor]):
        self._spec, self._store, self._engine, self._grid = rank.spec, rank.store, rank.engine, rank.grid
        self._emit, self._progress, self._tokens, self._validations = rank.emit, rank.progress, tokens, validations
        self._kept, self._reported = kept, rank.reported
        self._identity = {key: getattr(rank.spec, key) for key in _IDENTITY}
        self._newest: tuple[int, Written] | None = None
        self._refused = False  # shared memory was full at the last attempt, and the job has reported it
        self._last_s, self._cost_s = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether the next snapshot is due; rank 0 decides."""
        fixed_s = self._spec.snapshot_every_s  # 0: a snapshot only when the run is suspended
        if fixed_s is None:
            fixed_s = every_s(self._cost_s or self._layout.nbytes / self._grid.world_size / _GUESSED_BYTES_S)
        return fixed_s > 0 and time.monotonic() - self._last_s >= fixed_s

    def save(self, step: int) -> None:
        """Write the state after `step` steps into shared memory. If that is full, training continues without it."""
        try:
            self._write(step, self._store)
        except StoreFull as error:
            if not self._refused:
                self._emit("message", level="warn", text=f"no snapshot at step {step}: {error}")
            self._refused = True
        self._last_s = time.monotonic()

    def suspend(self, step: int) -> Written:
        """Write the state of a run that leaves its devices; to disk if shared memory is full."""
        if self._newest is not None and self._newest[0] == step:
            return replace(self._newest[1], seconds=0.0)
        try:
            return self._write(step, self._store)
        except StoreFull as full:
            self._emit("message", level="warn", text=f"the snapshot of step {step} goes to disk: {full}")
            return self.save_on_disk(step)

    def save_on_disk(self, step: int) -> Written:
        """Write the state in the same format into the job's directory on disk."""
        return self._write(step, WeightStore(Path(self._spec.run_dir) / "snapshots", budget_bytes=None))

    @cached_property
    def _layout(self) -> Layout:
        """Names and shapes of all tensors; the same on every rank and for every step of a run."""
        trained = [p for p in fragments.parameters(self._engine) if p.trained]
        state = [TensorSpec(f"{part}.{p.name}", "F32", p.shape) for part in PARTS for p in trained]
        kept = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in self._kept.items()]
        return Layout.plan([*state, *kept])

    def _write(self, step: int, store: WeightStore) -> Written:
        """Write one snapshot. Raises as `write_together`."""
        self._progress.enter("snapshot")
        if self._grid.rank == 0:
            _forget_older(store, self._spec.job_id)

        def reserve() -> Draft:
            if stale := store.find(KIND, self._spec.job_id, version_name(step)):
                store.remove(stale)
            return store.reserve(self._layout, kind=KIND, model=self._spec.job_id, version=version_name(step))

        meta = {"step": step, "spec": self._identity, "tokens": self._tokens}
        meta["steps"] = [*self._reported]
        meta |= {"validations": [[*self._validations.scores.items()], self._validations.published]}
        written = write_together(store, self._layout, reserve, self._pieces(), meta)
        self._newest, self._cost_s, self._refused = (step, written), written.seconds, False
        self._emit("snapshot", step=step, **asdict(written))
        return written

    def _pieces(self) -> Iterator[Piece]:
        """The pieces that this rank writes; the first rank also writes `kept`."""
        yield from _state_of(fragments.written(self._engine, fragments.trained_fragments(self._engine)))
        if self._grid.rank == 0:
            yield from self._kept_pieces()

    def _kept_pieces(self) -> Iterator[Piece]:
        return ((name, Strided(0, t.numel(), t.numel(), 1), t.view(-1)) for name, t in self._kept.items())

    def read(self, path: str) -> int:
        """Load engine, validations and `kept` from the snapshot at `path`, from any world size; return the snapshot's
        step. Raises SnapshotMismatch if the snapshot is gone or belongs to another run."""
        engine = self._engine
        try:
            stored = StoredVersion.read(Path(path))
        except IntegrityError as error:
            raise SnapshotMismatch(f"there is no snapshot at {path}: it was removed or never committed") from error
        meta = stored.manifest.meta
        with take_lease(stored) as lease, torch.no_grad():
            for key, own in self._identity.items():
                if (theirs := meta["spec"][key]) != own:
                    raise SnapshotMismatch(f"the snapshot {path} was made with {key} {theirs!r}, the run has {own!r}")
            if meta["tokens"] != self._tokens:
                raise SnapshotMismatch(
                    f"the snapshot {path} was made with other tokens of the training data; did the tokenizer or the "
                    "chat template of the base model change?"
                )
            shapes = {placed.spec.name: placed.spec.shape for placed in lease.layout}
            trained = [p for p in fragments.parameters(engine) if p.trained]
            kept = {name: tuple(tensor.shape) for name, tensor in self._kept.items()}
            for name, shape in ({f"master.{p.name}": p.shape for p in trained} | kept).items():
                if shapes.get(name) != shape:
                    raise SnapshotMismatch(
                        f"the snapshot {path} has {shapes.get(name)} as {name}, the run {shape}; it belongs to another "
                        "model, method, data or other LoRA targets"
                    )
            step = int(meta["step"])
            fragments.create_moments(engine, step)
            copies.read(lease, _state_of(fragments.trained_fragments(engine)))
            if fragments.is_zero3(engine):
                fragments.gather_weights(engine)
            else:  # every rank reads the file: far faster than an all-gather through gloo
                copies.read(lease, ((f"master.{p.name}", p.held, p.tensor.data.view(-1)) for p in trained))
            copies.read(lease, self._kept_pieces())
        engine.global_steps, engine.global_samples = step, step * self._spec.batch_size
        scores, self._validations.published = meta["validations"]
        self._validations.scores = dict(scores)
        self._emit("steps", steps=meta["steps"])
        return step


def _state_of(owned: Iterable[Fragment]) -> Iterator[Piece]:
    for fragment in owned:
        assert fragment.moments.keys() == set(fragments.MOMENTS), "there are no moments before the first step"
        for part, ours in (("master", fragment.weights), *fragment.moments.items()):
            for runs, elements in fragment.pieces():
                yield f"{part}.{fragment.name}", runs, ours[elements]


def _forget_older(store: WeightStore, job_id: str) -> None:
    """Remove all snapshots of the job except the newest, which must last until the next one is committed."""
    of_job = [stored for stored in store.list(KIND) if stored.model == job_id]
    of_job.sort(key=lambda stored: stored.manifest.meta["step"], reverse=True)
    for stored in of_job[1:]:
        try:
            store.remove(stored)
        except StoreError:  # a copy to disk still reads it: the next snapshot retries
            continue
