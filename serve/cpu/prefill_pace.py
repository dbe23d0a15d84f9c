"""How many tokens an engine's step may compute while somebody waits for the next one. Pure: it is told the times.

On a CPU the prompt tokens of a step take milliseconds each, and all streams of the engine wait for the step: a prompt
of 1,700 tokens in one piece stopped them for 13 s. So a step gets as many tokens as take 0.75 s while answers are being
written, and twice as many while none is: as long as a new request waits at most for the step before its own. Smaller
pieces cost throughput, since each step has a part that does not depend on its tokens: 0.5 s cost 6 % where that part
is 30 ms.

Answers take as long as prompt tokens there: beside a hundred streams of one owner each step took 0.8 s, and another's
answer of four tokens 5 s. So answers of several owners take turns where a step of all of them is longer than 0.25 s,
which costs no throughput as long as what does not depend on tokens is little of that. Where it is more, it costs much:
with 0.3 s for that and 5 ms for an answer (weights of some GB from a desktop's memory), 62 answers of one owner and one
of another's come at 43 tokens a second instead of 103, by computed times.
"""

from __future__ import annotations

WRITING_S = 0.75
NOBODY_WRITES_S = 1.5
SHARED_S = 0.25
LEAST = 32
"""Tokens: fewer than that take little less time."""
FIRST = 64
"""Before anything was measured."""
_TELLING = 16
"""A step with fewer tokens says nothing of what a token takes."""
LEAST_ANSWERS = _TELLING
"""Steps of fewer would never be told to have become quicker."""
_SMOOTHING = 0.5


class PrefillPace:
    """most: tokens of a step that the engine is made for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._tokens_per_s = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has taken this long."""
        if tokens < _TELLING or seconds <= 0:
            return
        rate = tokens / seconds
        known = self._tokens_per_s
        self._tokens_per_s = rate if not known else known + _SMOOTHING * (rate - known)

    def budget(self, writing: int) -> int:
        """Tokens of the next step. writing: how many answers are being written; each takes one of them."""
        seconds = WRITING_S if writing else NOBODY_WRITES_S
        prompt = int(self._tokens_per_s * seconds) if self._tokens_per_s else FIRST
        return min(self.most, writing + max(LEAST, prompt))

    def answers(self) -> int | None:
        """How many answers a step takes in which several owners have some; None before anything was measured."""
        return max(LEAST_ANSWERS, int(self._tokens_per_s * SHARED_S)) if self._tokens_per_s else None
