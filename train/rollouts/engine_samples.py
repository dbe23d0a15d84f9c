"""Answers that engines of the box give: asked for when it is the step's turn, or ahead of it, while the ranks learn
from an earlier step.

Ahead of its turn only the first question of a step is asked, so that whoever answers holds few of them. The rest is
asked in the step's turn, and the ranks sample what engines left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from train.control.progress import Events
from train.rollouts.hearing import Hearing
from train.rollouts.policy import Policy, shared, steps_to_request, take_answers
from train.rollouts.sampler import Answers
from train.rollouts.wanted import TRAINING, Wanted
from train.state.fragments import Grid
from weights.format.errors import StoreFull

REQUEST_TOKENS = 1 << 19
"""Tokens of the prompts and answers of one question to engines: the controller holds all of them, for all jobs, and a
step may have thousands of answers of a hundred thousand tokens."""


class _Request(NamedTuple):
    version: str
    question: str


class EngineSamples:
    """The samples of one rank. room: tokens of an answer. staleness: by how many updates the weights that write it may
    be behind those that learn from it. ends: tokens that end an answer. Invariant: `_ahead` has, by step, the questions
    that were asked ahead of their turn."""

    def __init__(
        self,
        policy: Policy,
        hearing: Hearing,
        grid: Grid,
        emit: Events,
        *,
        room: int,
        staleness: int,
        ends: Callable[[], Sequence[int]],
        vocabulary: int,
        device: torch.device,
    ):
        self.policy, self.staleness = policy, staleness
        self._hearing, self._grid, self._emit = hearing, grid, emit
        self._room, self._ends, self._vocabulary, self._device = room, ends, vocabulary, device
        self._ahead: dict[int, _Request] = {}
        self._why = ""  # an engine did not answer, as it was last reported

    def ask_ahead(
        self,
        step: int,
        total: int,
        wanted_of: Callable[[int], Wanted],
        taken_up: bool,
        whole: Callable[[Wanted, str, Answers], None],
    ) -> None:
        """Collective: asks for the samples of steps that may have this one's weights. taken_up: this one's are there.
        whole: takes what is wanted of a step, its version and its answers on rank 0, if engines have given all of them,
        as soon as they have, on another thread."""
        due = steps_to_request(step, self.staleness, total, {*self._ahead, *([step] if taken_up else [])})
        try:
            version = self.policy.version(step)
        except StoreFull:  # raised on every rank; the call in the step's own turn reports it
            return
        for one in due:
            wanted = wanted_of(one)
            lines, *others = questions(wanted, self._room)
            self._ahead[one] = question = _Request(version, _name(wanted, version, lines))
            if self._grid.rank == 0:
                then = self._take_whole(wanted, version, whole) if not others else None
                self._hearing.ask(question.question, self._question(version, wanted, lines), then)

    def version_ahead(self, step: int) -> str | None:
        """The version that was asked for the samples of a step ahead of its turn."""
        question = self._ahead.get(step)
        return question.version if question is not None else None

    def answers(self, wanted: Wanted, step: int) -> Answers | None:
        """Collective: the engines' answers, on every rank, with size 0 for missing ones; None if the devices were
        wanted. step: of the current model."""
        made, why = Answers.empty(len(wanted), self._room, staleness=self.staleness), ""
        ahead = self._ahead.get(step) if wanted.purpose == TRAINING else None
        for number, lines in enumerate(questions(wanted, self._room)):
            try:
                early = ahead if ahead is not None and number == 0 else None
                version = self.policy.version(step) if early is None else early.version
            except StoreFull as full:  # raised on every rank
                why = f"no room for the model as it is: {full}"
                break
            question = _name(wanted, version, lines)
            answered, answer = self._hearing.heard(question, self._question(version, wanted, lines))
            if not answered:
                return None
            if self._grid.rank == 0:
                take_answers(answer["samples"], made, self._vocabulary, step, version)
                why = answer["why"] or why
        if wanted.purpose == TRAINING:
            self._ahead.pop(step, None)
        self._say(why)
        return shared(made, self._device)

    def _take_whole(
        self, wanted: Wanted, version: str, whole: Callable[[Wanted, str, Answers], None]
    ) -> Callable[[Any], None]:
        def then(answer: Any) -> None:
            made = Answers.empty(len(wanted), self._room, staleness=self.staleness)
            take_answers(answer["samples"], made, self._vocabulary, wanted.step, version)
            if made.sizes.all():
                whole(wanted, version, made)

        return then

    def _question(self, version: str, wanted: Wanted, lines: list[tuple[int, int, int]]) -> dict[str, Any]:
        """On rank 0, which asks it."""
        if self._grid.rank != 0:
            return {}
        prompts = [
            {
                "place": place,
                "n": n,
                "seed": int(wanted.numbers(first).integers(1 << 62)) + place - first,
                "tokens": wanted.prompt(place).tolist(),
            }
            for first, place, n in lines
        ]
        return self.policy.question(version, prompts, self._room, self._ends())

    def _say(self, why: str) -> None:
        """Why the ranks sample, when that has changed."""
        if why != self._why and self._grid.rank == 0:
            text = f"the ranks sample what no engine answers: {why}" if why else "an engine samples again"
            self._emit("message", level="warn" if why else "info", text=text)
        self._why = why


def questions(wanted: Wanted, room: int) -> list[list[tuple[int, int, int]]]:
    """The questions to engines, of REQUEST_TOKENS each, the same on every rank: (place of the prompt's first answer,
    place of the first that is asked for, answers). room: tokens of an answer."""
    most, left = max(1, REQUEST_TOKENS // room), 0
    found: list[list[tuple[int, int, int]]] = []
    for first in range(0, len(wanted), wanted.each):
        size = len(wanted.prompt(first))
        for place in range(first, first + wanted.each, most):
            n = min(most, first + wanted.each - place)
            if size + n * room > left or not found:
                found.append([])
                left = REQUEST_TOKENS
            found[-1].append((first, place, n))
            left -= size + n * room
    return found


def _name(wanted: Wanted, version: str, lines: list[tuple[int, int, int]]) -> str:
    """The name of a question. No other world has the version, and no other question of this world the rest."""
    purpose = "train" if wanted.purpose == TRAINING else "valid"
    return f"sample-{purpose}-{wanted.step}-{version}-{wanted.before + lines[0][1]}"
