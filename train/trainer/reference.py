"""Log-probabilities of every sequence of the data to the starting model, computed once, before the first step, and kept
with the job.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.rank import Rank
from train.data.token_set import TokenSet
from train.methods.packed_objective import to_batch
from train.plan.errors import TrainingDiverged
from train.plan.spec import TrainSpec

_SAVE_EVERY_S = 10.0


class Reference:
    """values: (examples, sequences) float32 of a token set, of which those of its first packs are known.
    `tokens.reference` is None until all are."""

    def __init__(self, rank: Rank, tokens: TokenSet):
        self._rank, self._tokens = rank, tokens
        self._path = Path(rank.spec.run_dir) / "reference" / f"{_key(rank.spec, tokens)}.npz"
        if self._path.exists():
            with np.load(self._path) as kept:
                self._set(kept["values"], int(kept["done"]))
        else:
            self._set(np.zeros((tokens.n_examples, tokens.sequences), np.float32), 0)

    def _set(self, values: np.ndarray, done: int) -> None:
        self.values, self._done = values, done
        if self.complete:
            self._tokens.reference = values

    @property
    def complete(self) -> bool:
        return self._done == len(self._tokens.packs)

    def compute(self, agree: Callable[[], Any]) -> None:
        """Collective: compute the values that are not known yet. The engine's weights must be the starting ones. agree:
        called before each row; raises DevicesWanted, and a later run goes on from the values known by then."""
        if self.complete:
            return
        began_s = saved_s = time.monotonic()
        try:
            while not self.complete:
                agree()
                self._compute_some()
                if time.monotonic() - saved_s > _SAVE_EVERY_S:
                    self._save()
                    saved_s = time.monotonic()
        finally:
            self._save()
        text = f"the starting model read {self._tokens.n_examples} examples for reference: "
        self._rank.emit("message", level="info", text=f"{text}{time.monotonic() - began_s:.1f} s")

    def _compute_some(self) -> None:
        """Collective: compute one row on each rank."""
        tokens, grid, engine = self._tokens, self._rank.grid, self._rank.engine
        self._rank.progress.enter("reference")
        own_pack = self._done + grid.data_rank
        packs = range(self._done, min(self._done + grid.data_size, len(tokens.packs)))
        # Every rank runs equally many forwards: under ZeRO-3 each of them is a collective.
        row = tokens.row(np.array([min(own_pack, packs[-1])]))
        engine.eval()
        with torch.no_grad():
            log_probs = engine(to_batch(row, 1.0, engine.device) | {"as_reference": True})
        engine.train()
        members = [tokens.packs[pack] for pack in packs]
        totals = torch.zeros(sum(map(len, members)), tokens.sequences, dtype=torch.float32, device=engine.device)
        if own_pack in packs and grid.tensor_rank == 0:
            start = sum(map(len, members[: grid.data_rank]))
            totals[start : start + len(members[grid.data_rank])] = log_probs.view(-1, tokens.sequences)
        comm.all_reduce(totals)
        if not totals.isfinite().all():
            raise TrainingDiverged(0, totals.sum().item(), 0.0)
        self.values[np.concatenate(members)] = totals.cpu().numpy()
        self._set(self.values, self._done + len(packs))

    def take(self, values: torch.Tensor) -> None:
        """Take all values from a snapshot."""
        self._set(values.numpy(), len(self._tokens.packs))
        self._save()

    def _save(self) -> None:
        if self._rank.grid.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            with open(partial, "wb") as file:
                np.savez(file, values=self.values, done=self._done)
            os.rename(partial, self._path)


def _key(spec: TrainSpec, tokens: TokenSet) -> str:
    # Not the path of a base with a version: it is in shared memory at one time and on disk at another.
    base = [spec.base_model, spec.base_version] if spec.base_version else [spec.base_path, spec.base_adapter]
    facts = [*base, tokens.digest, tokens.capacity, spec.packing, spec.method, spec.options, spec.precision]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
