"""Decides how many tokens an engine's step may compute while somebody waits for the next one. Pure: callers pass the
times.

On a CPU the prompt tokens of a step take milliseconds each, and all streams of the engine wait for the step: a prompt
of 1,700 tokens in one piece stopped them for 13 s. So a step gets as many tokens as take 0.75 s while answers are being
written, and twice as many while none is: as long as a new request waits at most for the step before its own. Smaller
pieces cost throughput, since each step has a part that does not depend on its tokens: 0.5 s cost 6 % where that part
is 30 ms.

Answers take as long as prompt tokens there: beside a hundred streams of one owner each step took 0.8 s, and another's
answer of four tokens 5 s. So answers of several owners take turns where a step of all of them is longer than 0.25 s.
A step has as many as take together what does not depend on them, though it be longer: with 0.3 s for that (weights of
some GB from a desktop's memory) and 5 ms for an answer, 62 answers of one owner and one of another's came at 43 tokens
a second instead of 103, by computed times. What does not depend on them is read off steps of answers alone, in which
their number differs; a prompt token costs less than an answer, which reads its context.
"""

from __future__ import annotations

WRITING_S = 0.75
NOBODY_WRITES_S = 1.5
SHARED_S = 0.25
LEAST = 32
"""Tokens: fewer than that take little less time."""
FIRST = 64
"""Before anything was measured."""
_FEWEST_TOKENS = 16
"""A step with fewer tokens does not show how long a token takes."""
LEAST_ANSWERS = _FEWEST_TOKENS
"""Steps with fewer answers would never be seen to become quicker."""
_SMOOTHING = 0.5
_LINE_SMOOTHING = 0.1
_APART = 1 / 8
"""The spread of answers in a step, as a share of their mean, from which on a line through the steps is meaningful."""


class PrefillPace:
    """most: tokens of a step that the engine is made for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._tokens_per_s = 0.0
        self._line = Line()
        self._worth = 0
        """Answers that take as long as what does not depend on them."""

    def computed(self, tokens: int, seconds: float, answers_alone: bool = False) -> None:
        """A step has taken this long. answers_alone: each of its tokens is of another answer."""
        if tokens < _FEWEST_TOKENS or seconds <= 0:
            return
        if answers_alone:
            self._line.add(tokens, seconds)
            self._worth = self._line.offset_in_steps(self.most) if self._line.tells() else self._worth
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
        return max(LEAST_ANSWERS, self._worth, int(self._tokens_per_s * SHARED_S)) if self._tokens_per_s else None


class Line:
    """The line through points of which the newest count most: weighted means and covariances (West 1979)."""

    def __init__(self) -> None:
        self._points = 0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._points += 1
        weight = max(_LINE_SMOOTHING, 1 / self._points)
        from_x, from_y = x - self._x, y - self._y
        self._x += weight * from_x
        self._y += weight * from_y
        self._xx = (1 - weight) * (self._xx + weight * from_x * from_x)
        self._xy = (1 - weight) * (self._xy + weight * from_x * from_y)

    def tells(self) -> bool:
        return self._xx > (_APART * self._x) ** 2

    def offset_in_steps(self, most: int) -> int:
        """The x at which the line has twice its value at 0; `most` if it hardly rises."""
        slope = self._xy / self._xx
        offset = self._y - slope * self._x
        return max(0, int(min(most, offset / slope))) if slope > 0 else most
