"""Computes what the starting model says of every sequence of the data, once, before the first step, and keeps it with
the job.

A method that compares the trained model with the one it started from (Method.needs_reference) thus needs no second copy
of the weights: before the first step the model is still the starting one (an adapter adds nothing yet). The ranks share
the packs, and the values are added up over the ranks, so every rank has all of them.

The values are in `<run_dir>/reference/<key>.npz`; the key is the base version, the tokens (so the template, the
tokenizer and the data) and how they are computed: whoever starts a run may put those of another there. They are in
every snapshot too, for a run that goes on elsewhere: by then the starting model is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.progress import Events, Progress
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.methods.packed_objective import to_batch
from train.plan.errors import SnapshotMismatch, TrainingDiverged
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.snapshot import Snapshots

_SAVE_EVERY_S = 10.0
_PREFIX = "reference."  # of the names in a snapshot


class Reference:
    """The references of the token sets of one run, by name. A set's `reference` is None until all of it is known."""

    def __init__(
        self,
        method: Method,
        spec: TrainSpec,
        engine: Any,
        sets: Mapping[str, TokenSet | None],
        snapshots: Snapshots,
        emit: Events,
        progress: Progress,
    ):
        self._method, self._engine, self._emit, self._progress = method, engine, emit, progress
        self._snapshots = snapshots
        self._grid = fragments.grid(engine)
        needed = sets if method.needs_reference else {}
        self._values = {
            name: _Values(Path(spec.run_dir) / "reference" / f"{_key(spec, tokens)}.npz", tokens)
            for name, tokens in needed.items()
            if tokens is not None
        }
        self._began_s = self._saved_s = time.monotonic()

    @property
    def complete(self) -> bool:
        return all(values.complete for values in self._values.values())

    def learn_some(self) -> None:
        """Collective: compute one row on each rank, of a set that is not complete. The engine's weights must be the
        starting ones."""
        values = next(values for values in self._values.values() if not values.complete)
        self._progress.enter("reference")
        self._one_round(values)
        if values.complete or time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()
        if self.complete:
            pairs = ", ".join(f"{one.tokens.n_examples} examples ({name})" for name, one in self._values.items())
            seconds = time.monotonic() - self._began_s
            self._emit("message", level="info", text=f"the starting model read {pairs} for reference: {seconds:.1f} s")

    def save(self) -> None:
        """Write the values known so far, so that a run that is interrupted before its first step goes on from them."""
        self._saved_s = time.monotonic()
        if self._grid.rank == 0:
            for values in self._values.values():
                values.save()

    def kept(self) -> dict[str, torch.Tensor]:
        """The values by name, for the run's snapshots."""
        return {f"{_PREFIX}{name}": torch.from_numpy(values.values) for name, values in self._values.items()}

    def take_from(self, path: str) -> None:
        """Read missing values out of a snapshot of the run. Raises SnapshotMismatch if it lacks them."""
        for name, values in self._values.items():
            if values.complete:
                continue
            stored = self._snapshots.read_kept(path, f"{_PREFIX}{name}")
            if stored is None or stored.shape != values.values.shape:
                raise SnapshotMismatch(
                    f"the snapshot {path} has {None if stored is None else tuple(stored.shape)} as reference of the "
                    f"data {name!r}, expected {values.values.shape}; it was made with other data or by another method"
                )
            values.set(stored.numpy(), len(values.tokens.packs))
        self.save()

    def _one_round(self, values: _Values) -> None:
        tokens, grid = values.tokens, self._grid
        mine = values.done + grid.data_rank
        packs = range(values.done, min(values.done + grid.data_size, len(tokens.packs)))
        # Every rank runs equally many forwards: under ZeRO-3 each of them is a collective.
        row = tokens.row(np.array([min(mine, packs[-1])]))
        self._engine.eval()
        with torch.no_grad():
            log_probs = self._engine(to_batch(row, 1.0, self._engine.device) | {"as_reference": True})
        self._engine.train()
        members = [tokens.packs[pack] for pack in packs]
        totals = torch.zeros(sum(map(len, members)), tokens.sequences, dtype=torch.float32, device=self._engine.device)
        if mine in packs and grid.tensor_rank == 0:
            start = sum(map(len, members[: grid.data_rank]))
            totals[start : start + len(members[grid.data_rank])] = log_probs.view(-1, tokens.sequences)
        comm.all_reduce(totals)
        if not totals.isfinite().all():
            raise TrainingDiverged(0, totals.sum().item(), 0.0)
        values.values[np.concatenate(members)] = totals.cpu().numpy()
        values.set(values.values, values.done + len(packs))


class _Values:
    """(examples, sequences) float32 of a token set, of which those of the first `done` packs are known."""

    def __init__(self, path: Path, tokens: TokenSet):
        self._path, self.tokens = path, tokens
        if path.exists():
            with np.load(path) as kept:
                self.set(kept["values"], int(kept["done"]))
        else:
            self.set(np.zeros((tokens.n_examples, tokens.sequences), np.float32), 0)

    @property
    def complete(self) -> bool:
        return self.done == len(self.tokens.packs)

    def set(self, values: np.ndarray, done: int) -> None:
        self.values, self.done = values, done
        if self.complete:
            self.tokens.reference = values

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, values=self.values, done=self.done)
        os.rename(partial, self._path)


def _key(spec: TrainSpec, tokens: TokenSet) -> str:
    # Not the path of a base with a version: it is in shared memory at one time and on disk at another.
    base = [spec.base_model, spec.base_version] if spec.base_version else [spec.base_path, spec.base_adapter]
    facts = [*base, tokens.digest, tokens.capacity, spec.packing, spec.method, spec.options, spec.precision]
    facts += ["given"] if spec.data_order == "given" else []  # what is done is counted in its packs
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
