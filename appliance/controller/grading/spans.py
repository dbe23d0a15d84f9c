"""Answers that engines write for a model in training, in spans: an answer may be interrupted and continued by newer
weights, and each span knows its version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from appliance.controller.engines import sampling
from weights.format.names import step_of

_APART = 0x9E3779B97F4A7C15
"""Odd: the seeds of the spans of one answer lie as far apart as can be, those of neighbours differ by one."""
_SEEDS = 1 << 62


@dataclass(frozen=True, slots=True)
class Line:
    """One request: `n` answers to these tokens, of which the first has this place and this seed. share: of the engine
    capacity that a whole request takes. tries: how often it came back unanswered. ids, log_probs, spans: what exists
    already, if this request is the rest of one answer."""

    place: int
    n: int
    seed: int
    tokens: list[int]
    share: Fraction = Fraction(1)
    tries: int = 0
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    spans: tuple[tuple[str, int], ...] = ()

    def request(self, model: str, room: int, ends: Sequence[int]) -> dict[str, Any]:
        """The body. room: tokens of a whole answer."""
        # Different random numbers from the first span's, which would repeat its choices from the beginning.
        seed = (self.seed + len(self.ids) * _APART) % _SEEDS
        tokens = [*self.tokens, *self.ids]
        return sampling.request(model, tokens, n=self.n, seed=seed, max_tokens=room - len(self.ids), ends=ends)


def lines(prompt: dict[str, Any], room: int, one_by_one: bool = False) -> list[Line]:
    """Splits a prompt's answers into requests of as many answers as one may have, or of one each: vLLM 0.32 never
    forgets an interrupted request of several answers."""
    most, n = sampling.answers_at_once(room), prompt["n"]
    each, share = (1, Fraction(1, most)) if one_by_one else (most, Fraction(1))
    return [
        Line(prompt["place"] + first, min(each, n - first), prompt["seed"] + first, prompt["tokens"], share)
        for first in range(0, n, each)
    ]


def written(line: Line, version: str, made: Sequence[sampling.Sampled]) -> tuple[list[dict[str, Any]], list[Line]]:
    """What this version has written for a line: the answers that are whole now, in the form of the question's answer,
    and the lines that continue the others."""
    whole: list[dict[str, Any]] = []
    left = []
    for number, one in enumerate(made):
        ids, log_probs = (*line.ids, *one.ids), (*line.log_probs, *one.log_probs)
        spans = (*line.spans, (version, len(one.ids))) if one.ids else line.spans
        place, seed = line.place + number, line.seed + number
        if one.ended:
            answer = {"ids": [list(ids)], "log_probs": [list(log_probs)], "spans": [list(map(list, spans))]}
            whole.append({"place": place, **answer})
        else:
            left.append(replace(line, place=place, n=1, seed=seed, ids=ids, log_probs=log_probs, spans=spans))
    return whole, left


def is_newer(version: str, than: str) -> bool:
    """Whether a version of a model in training is of a later step than another, or of another world, which takes
    over."""
    (step, _, world), (other_step, _, other_world) = version.partition("."), than.partition(".")
    return world != other_world or step_of(step) > step_of(other_step)
