"""Answers that engines of the box give, with what the judge says of them: asked for in the step's turn, or ahead of it,
while the ranks learn from an earlier step. A question is one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from train.rollouts.hearing import Hearing
from train.rollouts.judge import Judge, Verdict
from train.rollouts.policy import Policy, shared, steps_to_request
from train.rollouts.sampler import Answers
from train.rollouts.wanted import TRAINING, Wanted
from train.state.fragments import Grid
from weights.format.names import step_of


class EngineSamples:
    """The samples of one rank.

    Args:
        room: tokens of an answer.
        staleness: by how many updates the weights that write an answer may be behind those that learn from it.
        ends: tokens that end an answer.

    Invariant: `_ahead` has, by step, the versions that were asked for samples before they were waited for.
    """

    def __init__(
        self,
        policy: Policy,
        hearing: Hearing,
        judge: Judge,
        grid: Grid,
        *,
        room: int,
        staleness: int,
        ends: Callable[[], Sequence[int]],
        device: torch.device,
    ):
        self.policy, self._hearing, self._judge, self._grid = policy, hearing, judge, grid
        self._room, self._staleness, self._ends, self._device = room, staleness, ends, device
        self._ahead: dict[int, str] = {}

    def ask(self, step: int, total: int, wanted_of: Callable[[int], Wanted], taken_up: bool) -> None:
        """Collective: asks for the samples of all steps that may have this one's weights. taken_up: this one's are
        there. Raises StoreFull, on every rank."""
        for one in steps_to_request(step, self._staleness, total, {*self._ahead, *([step] if taken_up else [])}):
            self._ahead[one] = self.policy.version(step)
            self._hearing.ask(self._questions(wanted_of(one), self._ahead[one]))

    def answers(self, wanted: Wanted, step: int) -> tuple[Answers, Verdict, int] | None:
        """Collective: the answers, the verdict on them, and by how many updates their weights are behind; None if the
        devices were wanted. step: of the current model. Raises NothingGraded and StoreFull, on every rank."""
        version = self._ahead.pop(step, "") if wanted.purpose == TRAINING else ""
        version = version or self.policy.version(step)
        heard = self._hearing.heard(self._questions(wanted, version))
        if heard is None:
            return None
        verdict, made = self._judge.verdict(heard), Answers.empty(len(wanted), self._room)
        for place, answer in zip(range(0, len(wanted), wanted.each), heard.values(), strict=False):
            for at, (ids, log_probs) in enumerate(zip(answer["ids"], answer["log_probs"], strict=True), place):
                made.ids[at, : len(ids)] = torch.tensor(ids)
                made.log_probs[at, : len(ids)] = torch.tensor(log_probs)
                made.sizes[at] = len(ids)
        return shared(made, self._device), verdict, step - step_of(version.partition(".")[0])

    def _questions(self, wanted: Wanted, version: str) -> dict[str, dict[str, Any]]:
        """By name, in the order of their places; none but on rank 0, which asks. No other world has the version, and no
        other question of this world the rest of a name."""
        if self._grid.rank != 0:
            return {}
        purpose = "train" if wanted.purpose == TRAINING else "valid"
        return {
            f"sample-{purpose}-{wanted.step}-{version}-{wanted.before + place}": {
                "kind": "sample",
                "policy": {"name": self.policy.name, "version": version},
                "base": self.policy.base,
                "n": wanted.each,
                "seed": int(wanted.numbers(place).integers(1 << 62)),
                "room": self._room,
                "ends": list(self._ends()),
                **self._judge.asked_about(wanted, place),
            }
            for place in range(0, len(wanted), wanted.each)
        }
