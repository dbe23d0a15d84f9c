"""Judges a finished run by its curves, in one sentence. A pure rule with conservative thresholds: what the validation
file alone can tell is not said without one, and a change within noise counts as none.

Codes
- `generalises`: the validation file got better too. `by_heart`: the training rows did, the validation file did not.
- `learned`: the training rows did; without a validation file nothing more is known.
- `still_falling`: better with each epoch to the end, so more epochs help.
- `did_not_move`: no change beyond noise. `got_worse`: the run ended worse than it began.
- `too_short`: too few steps to judge. `no_signal`: no step trained anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

FEWEST_STEPS = 4
FALLING_SHARE = 0.1
"""A curve still moves if its last epoch is better than the one before by this share."""
KNOWN_LOSS, SURE_OF_PAIRS = 0.1, 0.95
"""Nats for a token below which, and the share of pairs in the right order from which, more epochs teach nothing."""
SURE = 2.0
"""Standard errors of a difference beyond which it is none of noise."""
MOST_EPOCHS = 50
HIGHER_RATE = 3.0
WARNINGS = ("by_heart", "did_not_move", "got_worse", "no_signal")


class _Measure(NamedTuple):
    """What a method is judged by. better: 1 if a larger value is better, -1 if a smaller one is. A change of at most
    `least`, or `share` of the values, is noise. sampled: it is measured on the model's own answers, so that only means
    of many steps tell anything. things: of what the training file has rows."""

    name: str
    called: str
    better: int
    least: float
    share: float = 0.0
    sampled: bool = False
    things: str = "rows"

    def change(self, before: float, after: float, error: float = 0.0) -> int:
        """1 better, 0 within noise, -1 worse. error: standard error of the difference."""
        gain = self.better * (after - before)
        noise = max(self.least, self.share * max(abs(before), abs(after)), SURE * error)
        return 0 if abs(gain) < noise else 1 if gain > 0 else -1


_LOSS = _Measure("loss", "loss", -1, 0.05, 0.05)
_MARGIN = _Measure("rewards/margins", "margin of the preferred answers", 1, 0.1, things="pairs")
_MEASURES = {
    "dpo": _MARGIN,
    "reinforcement": _Measure("mean_reward", "mean reward", 1, 0.02, sampled=True, things="prompts"),
    "distillation": _Measure("reverse_kl", "distance to the teacher", -1, 0.02, sampled=True, things="prompts"),
}


class Verdict(NamedTuple):
    code: str
    text: str

    @property
    def is_warning(self) -> bool:
        return self.code in WARNINGS


def judge(method: str, steps: Sequence[Any], settings: Mapping[str, Any]) -> Verdict:
    """The verdict on a run.

    Args:
        method: name of the training method.
        steps: rows of the job's metrics by ascending `step`, up to the one whose weights are the result; step 0 is the
            starting model. Each has `loss` and `valid_loss`, None if they were not measured or are not numbers, and
            `measured` and `valid_measured` by the method's own names, or None.
        settings: fields of the TrainSpec, of which `n_epochs` and `learning_rate` are read.
    """
    done = [one for one in steps if one.step > 0]
    if done and all(map(equal_rewards, done)):
        return _no_signal(done)
    measure = _MEASURES.get(method, _LOSS)
    train = [value for one in done if (value := _value(one.loss, one.measured, measure.name)) is not None]
    if len(train) < FEWEST_STEPS:
        return Verdict(
            "too_short", f"{_count(len(train), 'step')} cannot show whether the model learned: raise n_epochs."
        )
    n_epochs, error = settings["n_epochs"], 0.0
    each = _epochs(train, n_epochs)
    start, end = fmean(train[: max(1, len(train) // 20)]), each[-1]  # the first steps have hardly moved
    order = [value for one in done if (value := _value(one.loss, one.measured, "rewards/accuracies")) is not None]
    if measure.sampled:
        first, last = train[: max(2, len(train) // 4)], train[-max(2, len(train) // 4) :]
        start, end = fmean(first), fmean(last)
        error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / len(first))
        known = True  # a step's mean says little of the next one's
    elif measure is _MARGIN:
        start, known = 0.0, bool(order) and _epochs(order, n_epochs)[-1] >= SURE_OF_PAIRS
    else:
        known = end < KNOWN_LOSS
    change, moved = measure.change(start, end, error), f"{measure.called} {start:.2f} → {end:.2f}"
    growing = not known and len(each) > 1 and measure.better * (each[-1] - each[-2]) > FALLING_SHARE * max(each[-2:])

    validated = [(_value(one.valid_loss, one.valid_measured, measure.name), one.step) for one in steps]
    valid = [(value, step) for value, step in validated if value is not None]
    if measure is _MARGIN and valid:
        valid.insert(0, (0.0, 0))
    generalised = None
    if len(valid) > 1:
        (before, _), (after, last_step) = valid[0], valid[-1]
        best, best_step = max(valid, key=lambda one: measure.better * one[0])
        moved += f", in the validation file {before:.2f} → {after:.2f}"
        generalised, growing = measure.change(before, after), growing and best_step == last_step
        if change > 0 and not measure.sampled and measure.change(best, after) < 0:
            generalised, moved = -1, f"{moved}, best ({best:.2f}) at step {best_step}"
    elif measure is _LOSS and change == 0 and start < KNOWN_LOSS:
        return Verdict("learned", f"The model knew the training rows before the job: {moved}.")
    return _conclude(change, generalised, growing, moved, measure.things, settings)


def _conclude(
    change: int, generalised: int | None, growing: bool, moved: str, things: str, settings: Mapping[str, Any]
) -> Verdict:
    """change, generalised: of training and validation, as `_Measure.change` has it; generalised is None without two
    validations. growing: still better at the end. moved: the change in words."""
    rate, epochs = settings["learning_rate"], min(MOST_EPOCHS, 2 * settings["n_epochs"])
    if change < 0 or (change == 0 and generalised == -1):
        return Verdict("got_worse", f"The model got worse: {moved}. Lower learning_rate to {rate / 10:.1e}.")
    if change == 0 and not generalised:
        text = f"The model did not learn: {moved}. Raise learning_rate to {HIGHER_RATE * rate:.1e}."
        return Verdict("did_not_move", text)
    if generalised is not None and generalised < 1:
        text = f"The model learned the training {things} by heart: {moved}. Fewer n_epochs"
        return Verdict("by_heart", f"{text}, publish 'best' or more varied {things} help.")
    if growing:
        more = f"Raise n_epochs to {epochs}." if epochs > settings["n_epochs"] else "Raise learning_rate."
        return Verdict("still_falling", f"The model is still learning: {moved}. {more}")
    if generalised:
        return Verdict("generalises", f"The model learned and generalises: {moved}.")
    text = f"The model learned the training {things}: {moved}. Only a validation_file shows how it does elsewhere."
    return Verdict("learned", text)


def equal_rewards(one: Any) -> bool:
    """Whether the answers to each prompt of the step got one reward, so that the step trained nothing."""
    return (one.measured or {}).get("equal_rewards") == 1.0


def _value(loss: float | None, measured: Mapping[str, float] | None, name: str) -> float | None:
    return loss if name == "loss" else (measured or {}).get(name)


def _no_signal(done: Sequence[Any]) -> Verdict:
    rewards = sorted({one.measured["mean_reward"] for one in done if "mean_reward" in one.measured})
    which = f" (all rewards are {rewards[0]:.3g})" if len(rewards) == 1 else ""
    return Verdict(
        "no_signal",
        f"Nothing was trained: in all {_count(len(done), 'step')} all answers to a prompt got the same reward{which}. "
        "Give a grader that tells better answers from worse ones (a score in place of right or wrong), easier or "
        "harder prompts, or more answers for each prompt (compute_multiplier).",
    )


def _epochs(train: Sequence[float], epochs: int) -> list[float]:
    """Mean of each epoch: rows differ in loss, and each epoch has all of them. A single epoch has no second value."""
    if epochs < 2 or len(train) < epochs:
        return [fmean(train[-max(1, len(train) // 10) :])]
    bounds = [round(number * len(train) / epochs) for number in range(epochs + 1)]
    return [fmean(train[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
