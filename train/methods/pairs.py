"""What methods that learn from pairs of outputs share: the records they take, and how a pair is cut and counted."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.data.formats import BadRecord, Record, to_pair
from train.methods.method import Method

if TYPE_CHECKING:
    import numpy as np

    from train.data.chat import Tokens
    from train.data.token_set import TokenSet


class Pairs(Method, ABC):
    """An example is a pair of outputs for one conversation. The loss of a step is divided by its pairs."""

    sequences = 2  # the preferred output, then the other
    cut_refuses = True

    def refuses(self, shape: str) -> str | None:
        if shape != "preference":
            hint = "; the method 'kto' takes answers with a 'label'" if shape == "unpaired" else ""
            return f"has the shape {shape!r}; the method {self.name!r} wants pairs of outputs, one preferred{hint}"
        return None

    def convert(self, record: Record, shape: str) -> Record | None:
        return {"sequences": to_pair(record)} if self.refuses(shape) is None else None

    def cut(self, sequences: Sequence[Tokens], max_length: int) -> Sequence[Tokens] | None:
        """Raises BadRecord for a pair of which a cut leaves nothing to compare."""
        short = [(ids[:max_length], learnt[:max_length]) for ids, learnt in sequences]
        for side, whole, (_, learnt) in zip(("preferred", "non-preferred"), sequences, short, strict=True):
            if not learnt[1:].any():
                raise BadRecord(
                    f"the {side} output begins after token {_first_learnt(whole)}; of max_length {max_length} tokens "
                    "nothing is left for it: give a larger max_length, or shorten the input"
                )
        (first, _), (second, _) = short
        if len(first) == len(second) and (first == second).all():
            raise BadRecord(
                f"both outputs are the same tokens within max_length {max_length}, so there is nothing to prefer"
            )
        return short

    def denominator(self, tokens: TokenSet, packs: np.ndarray) -> int:
        return tokens.examples_in(packs)


def _first_learnt(sequence: Tokens) -> int:
    _, learnt = sequence
    return int(learnt[1:].argmax()) + 1 if learnt[1:].any() else len(learnt)
