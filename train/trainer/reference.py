"""Log-probabilities of every sequence of the data to the starting model, computed once, before the first step, and kept
with the job.

A method that compares the trained model with the one it started from (Method.needs_reference) thus needs no second copy
of the weights: before the first step the model is still the starting one (an adapter adds nothing yet). The ranks share
the packs, and the values are added up over the ranks, so every rank has all of them.

The values are in `<run_dir>/reference`, by the digest of the tokens, so an aborted pass is resumed. They are in every
snapshot too, for a run that goes on elsewhere: by then the starting model is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.rank import DevicesWanted, Rank
from train.data.token_set import TokenSet
from train.methods.packed_objective import to_batch
from train.plan.errors import TrainingDiverged
from weights.format.names import replace_file


class Reference:
    """values: (examples, sequences) float32 of a token set, NaN where they are not known. `tokens.reference` is None
    until all are."""

    def __init__(self, rank: Rank, tokens: TokenSet):
        self._rank, self._tokens = rank, tokens
        self._path = Path(rank.spec.run_dir) / "reference" / tokens.digest
        values = np.full((tokens.n_examples, tokens.sequences), np.nan, np.float32)
        self._set(np.fromfile(self._path, np.float32).reshape(values.shape) if self._path.exists() else values)

    def _set(self, values: np.ndarray) -> None:
        self.values = values
        if self.complete:
            self._tokens.reference = values

    @property
    def complete(self) -> bool:
        return not np.isnan(self.values).any()

    def compute(self, agree: Callable[[], Any]) -> None:
        """Collective: compute the values that are not known yet. The engine's weights must be the starting ones. agree:
        called before each row; raises DevicesWanted, and a later run goes on from the values known by then."""
        if self.complete:
            return
        tokens, grid, engine, began_s = self._tokens, self._rank.grid, self._rank.engine, time.monotonic()
        unknown = [n for n, members in enumerate(tokens.packs) if np.isnan(self.values[members]).any()]
        done = 0
        known = torch.zeros(self.values.shape, dtype=torch.float32, device=engine.device)
        engine.eval()
        try:
            while done < len(unknown):
                agree()
                self._rank.progress.enter("reference")
                own = done + grid.data_rank
                # Every rank runs equally many forwards: under ZeRO-3 each of them is a collective.
                pack = unknown[min(own, len(unknown) - 1)]
                with torch.no_grad():
                    log_probs = engine(
                        to_batch(tokens.row(np.array([pack])), 1.0, engine.device) | {"as_reference": True}
                    )
                if own < len(unknown) and grid.tensor_rank == 0:
                    known[tokens.packs[pack]] = log_probs.view(-1, tokens.sequences)
                done += grid.data_size
        except DevicesWanted:
            if done:
                self._add(known, unknown[:done])
            raise
        self._add(known, unknown)
        engine.train()
        text = f"the starting model read {tokens.n_examples} examples for reference: "
        self._rank.emit("message", level="info", text=f"{text}{time.monotonic() - began_s:.1f} s")

    def _add(self, known: torch.Tensor, packs: list[int]) -> None:
        """Collective: the values of these packs, which each rank has a part of."""
        comm.all_reduce(known)
        if not known.isfinite().all():
            raise TrainingDiverged(0, known.sum().item(), 0.0)
        members = np.concatenate([self._tokens.packs[pack] for pack in packs])
        self.values[members] = known.cpu().numpy()[members]
        self.take(self.values)

    def take(self, values: np.ndarray) -> None:
        """Take these values, and keep them with the job."""
        self._set(values)
        if self._rank.grid.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, values.tobytes())
