"""The answers that a step or a validation needs: to which prompts, and with which random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.token_set import TokenSet

TRAINING, VALIDATION = 0, 1


@dataclass(frozen=True)
class Wanted:
    """path: of the file of the prompts. packs: of the prompt of each answer, (answers,); the `each` answers of a prompt
    follow each other. purpose and step: by which, with the seed of the job and the place of an answer, its random
    numbers are drawn. before: answers of the same purpose and step that were made before."""

    path: str
    tokens: TokenSet
    packs: np.ndarray
    each: int
    seed: int
    purpose: int
    step: int
    before: int = 0

    def __len__(self) -> int:
        return len(self.packs)

    def prompt(self, place: int) -> np.ndarray:
        """Token ids of that of an answer."""
        (index,) = self.tokens.packs[self.packs[place]]
        return self.tokens.tokens_of(int(index))

    def numbers(self, place: int) -> np.random.Generator:
        """The random numbers of one answer."""
        key = np.array([self.seed, (self.purpose << 63) | (self.step << 32) | (self.before + place)], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))
