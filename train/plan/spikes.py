"""Decides what a loss that jumped, or is not a number, means for a run: a pure rule over the losses of its steps.

Rules
- A loss is a spike if it lies above the median of the last `WINDOW` losses by more than `TIMES` their spread (the
  median distance from that median, as a standard deviation) and by more than `LEAST`. Before `ENOUGH` losses nothing
  is one, nor within `REST` steps of the last one, which the median has to forget first.
- What follows is what the job chose (`on_loss_spike`). Without a choice a spike is told and nothing else, and a loss
  that is not a number ends the job: weights that are not numbers either must not be published.
- A rollback goes with a lower rate, here as anywhere: a run computes the same again from the same snapshot. So does
  `lower_rate` after a loss that is not a number, from which nothing goes on. Each halves the learning rate from a step
  on, `MOST_CUTS` times at most; then a spike is told alone, and a loss that is not a number ends the job.
- A snapshot that a run went back to, and that breaks again within `SOON` steps, has broken weights or moments already:
  a rollback from it goes to the one before, where one is kept. That may go on beyond `MOST_CUTS`, at the rate reached,
  to `MOST_BACKS` in all.
- A spike at a step is acted on once: a run that does the step again, because somebody resumed it, is left alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Choice = Literal["none", "pause", "rollback", "lower_rate"]
CHOICES: tuple[Choice, ...] = ("none", "pause", "rollback", "lower_rate")

WINDOW, ENOUGH, REST = 32, 16, 8
TIMES, LEAST = 8.0, 0.5
OF_NORMAL = 1.4826  # a standard deviation in median distances, for normal noise
CUT, MOST_CUTS = 0.5, 2
SOON, MOST_BACKS = 3, 5


@dataclass(frozen=True, slots=True)
class Anomaly:
    """`action`: what follows; "fail" ends the job. `usual`: the median of the losses before. `cuts`: of the learning
    rate, by the number of steps after which each begins; of a rollback those before it, as the step that it goes back
    to is not known here. `poisoned`: the step of a snapshot that a rollback leaves out, with all that came after it."""

    step: int
    kind: Literal["spike", "not_finite"]
    action: Literal["none", "pause", "rollback", "lower_rate", "fail"]
    loss: float
    grad_norm: float
    usual: float | None
    cuts: tuple[int, ...] = ()
    poisoned: int | None = None

    @property
    def text(self) -> str:
        what = (
            f"the loss of step {self.step} or its gradient is not a number"
            if self.kind == "not_finite"
            else f"the loss of step {self.step} jumped to {self.loss:.4g}, usual is {self.usual:.4g}"
        )
        rate = "half the learning rate" if len(self.cuts) < MOST_CUTS else "the same learning rate"
        back = (
            f"the job goes back to its last snapshot, and on with {rate}"
            if self.poisoned is None
            else f"the snapshot of step {self.poisoned}, which the job had gone back to, is broken already; "
            f"it goes back to an older one, and on with {rate}"
        )
        follows = {
            "none": "nothing follows from it (on_loss_spike)",
            "pause": "the job is paused",
            "rollback": back,
            "lower_rate": "the learning rate is halved from here on",
            "fail": "the job ends",
        }
        return f"{what}: {follows[self.action]}"


class LossWatch:
    """The losses of a run so far. Whoever shows it the same losses gets the same answers: all ranks do.

    choice: what the job wants. cuts: of its learning rate, those so far. known: of `history`, when the run goes on.
    start: the steps that were done when this world began. older: snapshots that are kept from before then.
    """

    def __init__(
        self,
        choice: Choice,
        cuts: Sequence[int],
        known: dict[str, Any] | None = None,
        *,
        start: int = 0,
        older: int = 0,
    ):
        self._choice, self.cuts = choice, tuple(cuts)
        self._start, self._older = start, older
        told = known or {"losses": [], "spikes": []}
        self._losses: deque[float] = deque(told["losses"], maxlen=WINDOW)
        self._spikes: list[int] = list(told["spikes"])

    def look(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        """`step` is done, with this loss and this norm of its gradient."""
        usual = statistics.median(self._losses) if self._losses else None
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            poisoned = self._start if self._is_poisoned(step) else None
            action = self._after_no_number(poisoned is not None)
            left_out = poisoned if action == "rollback" else None
            return Anomaly(step, "not_finite", action, loss, grad_norm, usual, self.cuts, left_out)
        is_spike = self._is_spike(step, loss)
        self._losses.append(loss)
        if not is_spike:
            return None
        chosen: Literal["none", "pause", "rollback", "lower_rate"] = self._choice
        if step in self._spikes or (chosen in ("rollback", "lower_rate") and len(self.cuts) >= MOST_CUTS):
            chosen = "none"
        if chosen == "lower_rate":
            self.cuts = (*self.cuts, step)
        self._spikes.append(step)
        return Anomaly(step, "spike", chosen, loss, grad_norm, usual, self.cuts)

    def rate(self, step: int) -> float:
        """What the learning rate of the step after `step` steps is multiplied by."""
        return CUT ** min(sum(cut <= step for cut in self.cuts), MOST_CUTS)

    def _is_poisoned(self, step: int) -> bool:
        """Whether the snapshot that this world began with broke again at once, and there is one before it."""
        went_back = bool(self.cuts) and self.cuts[-1] == self._start
        return went_back and step - self._start <= SOON and self._older > 0

    def _after_no_number(self, poisoned: bool) -> Literal["pause", "rollback", "fail"]:
        if self._choice == "pause":
            return "pause"
        most = MOST_BACKS if poisoned else MOST_CUTS
        return "rollback" if self._choice != "none" and len(self.cuts) < most else "fail"

    def _is_spike(self, step: int, loss: float) -> bool:
        if len(self._losses) < ENOUGH or any(0 < step - last <= REST for last in self._spikes):
            return False
        usual = statistics.median(self._losses)
        spread = OF_NORMAL * statistics.median(abs(one - usual) for one in self._losses)
        return loss - usual > max(TIMES * spread, LEAST)


def history(events: Iterable[dict[str, Any]], step: int) -> dict[str, Any]:
    """What a `LossWatch` has to know of a run that goes on after `step` steps, from the run's own events; plain JSON.
    Losses of steps that are done again do not count; spikes do, whatever became of their steps."""
    losses: dict[int, float] = {}
    spikes: list[int] = []
    for event in events:
        if event["event"] == "metrics" and event["step"] <= step:
            losses[event["step"]] = event["loss"]
        elif event["event"] == "anomaly" and event["kind"] == "spike":
            spikes.append(event["step"])
    return {"losses": [losses[one] for one in sorted(losses)][-WINDOW:], "spikes": sorted(set(spikes))}
