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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

FEWEST_STEPS = 4
MOVED_SHARE, MOVED_LEAST = 0.05, 0.05
"""A loss moved if it changed by this share and by so many nats; a smaller change is noise."""
FALLING_SHARE = 0.1
"""A loss still falls if its last epoch is lower than the one before by this share."""
KNOWN_LOSS = 0.1
"""Nats for a token, below which the rows are known and more epochs teach nothing."""
MOVED_MARGIN, SURE_OF_PAIRS = 0.1, 0.95
"""Of `rewards/margins`, and the share of pairs in the right order, above which more epochs add nothing."""
MOVED_REWARD, SURE = 0.02, 2.0
"""Of a mean reward, and in standard errors of the difference."""
MOST_EPOCHS = 50
HIGHER_RATE = 3.0
WARNINGS = ("by_heart", "did_not_move", "got_worse", "no_signal")


class Verdict(NamedTuple):
    code: str
    text: str

    @property
    def is_warning(self) -> bool:
        return self.code in WARNINGS


@dataclass(frozen=True, slots=True)
class Step:
    """What is known of one step, or of the starting model (`step` 0). Losses are None if they were not measured or are
    not numbers. measured, valid_measured: by the method's own names."""

    step: int
    loss: float | None = None
    valid_loss: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    valid_measured: Mapping[str, float] = field(default_factory=dict)


def judge(method: str, steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    """The verdict on a run.

    Args:
        method: name of the training method.
        steps: by ascending number, up to the one whose weights are the result.
        settings: fields of the TrainSpec, of which `n_epochs` and `learning_rate` are read.
    """
    done = sum(one.step > 0 for one in steps)
    found = _no_signal(steps)
    if found is None and done < FEWEST_STEPS:
        return Verdict("too_short", f"{_count(done, 'step')} cannot show whether the model learned: raise n_epochs.")
    return found or _RULES.get(method, _supervised)(steps, settings)


def equal_rewards(one: Step) -> bool:
    """Whether the answers to each prompt of the step got one reward, so that the step trained nothing."""
    return one.measured.get("equal_rewards") == 1.0


def _no_signal(steps: Sequence[Step]) -> Verdict | None:
    done = [one for one in steps if one.step > 0]
    if not done or not all(map(equal_rewards, done)):
        return None
    rewards = sorted({one.measured["mean_reward"] for one in done if "mean_reward" in one.measured})
    which = f" (all rewards are {rewards[0]:.3g})" if len(rewards) == 1 else ""
    return Verdict(
        "no_signal",
        f"Nothing was trained: in all {_count(len(done), 'step')} all answers to a prompt got the same reward{which}. "
        "Give a grader that tells better answers from worse ones (a score in place of right or wrong), easier or "
        "harder prompts, or more answers for each prompt (compute_multiplier).",
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rule read off the curves. change, valid: 1 better, 0 within noise, -1 worse; valid is None if there were
    no two validations, growing: still better at the end. things: of what the training file has rows."""

    moved: str
    change: int
    valid: int | None = None
    growing: bool = False
    things: str = "rows"


def _conclude(seen: _Seen, settings: Mapping[str, Any]) -> Verdict:
    moved, things = seen.moved, seen.things
    rate, epochs = settings["learning_rate"], min(MOST_EPOCHS, 2 * settings["n_epochs"])
    more = f"Raise n_epochs to {epochs}." if epochs > settings["n_epochs"] else "Raise learning_rate."
    if seen.change < 0 or (seen.change == 0 and seen.valid == -1):
        return Verdict("got_worse", f"The model got worse: {moved}. Lower learning_rate to {rate / 10:.1e}.")
    if seen.change == 0 and not seen.valid:
        text = f"The model did not learn: {moved}. Raise learning_rate to {HIGHER_RATE * rate:.1e}."
        return Verdict("did_not_move", text)
    if seen.valid is not None and seen.valid < 1:
        text = f"The model learned the training {things} by heart: {moved}. Fewer n_epochs"
        return Verdict("by_heart", f"{text}, publish 'best' or more varied {things} help.")
    if seen.growing:
        return Verdict("still_falling", f"The model is still learning: {moved}. {more}")
    if seen.valid:
        return Verdict("generalises", f"The model learned and generalises: {moved}.")
    text = f"The model learned the training {things}: {moved}. Only a validation_file shows how it does elsewhere."
    return Verdict("learned", text)


def _supervised(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    train = [one.loss for one in steps if one.step > 0 and one.loss is not None]
    if not train:
        return Verdict("too_short", "No loss was reported, so nothing is known of what the model learned.")
    each = _epochs(train, settings)
    start, end = fmean(train[: max(1, len(train) // 20)]), each[-1]  # the first steps have hardly moved
    change = _change(start, end)
    moved = f"training loss {start:.2f} → {end:.2f}"
    growing = len(each) > 1 and each[-1] >= KNOWN_LOSS and each[-2] - each[-1] > FALLING_SHARE * each[-2]
    valid = [(one.valid_loss, one.step) for one in steps if one.valid_loss is not None]
    if len(valid) < 2:
        if change == 0 and start < KNOWN_LOSS:
            return Verdict("learned", f"The model knew the training rows before the job: {moved}.")
        return _conclude(_Seen(moved, change, growing=growing), settings)
    (before, _), (after, last), (best, best_step) = valid[0], valid[-1], min(valid)
    moved += f", validation loss {before:.2f} → {after:.2f}"
    found = _change(before, after)
    if change > 0 and _change(best, after) < 0:
        found, moved = -1, f"{moved}, lowest ({best:.2f}) at step {best_step}"
    return _conclude(_Seen(moved, change, found, growing and best_step == last), settings)


def _pairs(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    margins, order = _measured(steps, "rewards/margins"), _measured(steps, "rewards/accuracies")
    if not margins or not order:
        return _supervised(steps, settings)
    each = _epochs(margins, settings)
    end, share = each[-1], _epochs(order, settings)[-1]
    moved = f"margin of the preferred answers {end:.2f}, {share:.0%} of the pairs in the right order"
    valid = [one.valid_measured["rewards/margins"] for one in steps if "rewards/margins" in one.valid_measured]
    found = None
    if valid:
        moved += f"; margin {valid[-1]:.2f} in the validation file"
        found = 1 if valid[-1] >= MOVED_MARGIN * min(1.0, end) else 0
    change = 1 if end >= MOVED_MARGIN else -1 if end < -MOVED_MARGIN else 0
    growing = len(each) > 1 and share < SURE_OF_PAIRS and end - each[-2] > FALLING_SHARE * end
    return _conclude(_Seen(moved, change, found if change > 0 else None, growing, "pairs"), settings)


def _noisy(steps: Sequence[Step], settings: Mapping[str, Any], name: str, called: str, better: int) -> Verdict:
    """For what is measured on the model's own answers: the first and the last quarter of the steps are compared, with
    their spread. better: 1 if a larger value is better, -1 if a smaller one is."""
    train = _measured(steps, name)
    quarter = max(2, len(train) // 4)
    if len(train) < 2 * quarter:
        return Verdict("too_short", f"{_count(len(train), 'step')} cannot show whether the model learned.")
    first, last = train[:quarter], train[-quarter:]
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / quarter)
    gain, least = better * (fmean(last) - fmean(first)), max(MOVED_REWARD, SURE * error)
    change = 1 if gain >= least else -1 if gain < -least else 0
    moved = f"{called} {fmean(first):.2f} → {fmean(last):.2f}"
    valid = [one.valid_measured[name] for one in steps if name in one.valid_measured]
    found = None
    if len(valid) > 1:
        moved += f", in the validation file {valid[0]:.2f} → {valid[-1]:.2f}"
        found = 1 if better * (valid[-1] - valid[0]) >= MOVED_REWARD else 0
    return _conclude(_Seen(moved, change, found if change > 0 else None, things="prompts"), settings)


_RULES: dict[str, Callable[[Sequence[Step], Mapping[str, Any]], Verdict]] = {
    "dpo": _pairs,
    "reinforcement": partial(_noisy, name="mean_reward", called="mean reward", better=1),
    "distillation": partial(_noisy, name="reverse_kl", called="distance to the teacher", better=-1),
}


def _measured(steps: Sequence[Step], name: str) -> list[float]:
    return [one.measured[name] for one in steps if one.step > 0 and name in one.measured]


def _epochs(train: Sequence[float], settings: Mapping[str, Any]) -> list[float]:
    """Mean of each epoch: rows differ in loss, and each epoch has all of them. A single epoch has no second value."""
    epochs = settings["n_epochs"]
    if epochs < 2 or len(train) < epochs:
        return [fmean(train[-max(1, len(train) // 10) :])]
    bounds = [round(number * len(train) / epochs) for number in range(epochs + 1)]
    return [fmean(train[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _change(before: float, after: float) -> int:
    """Of a loss: 1 lower, -1 higher, 0 within noise."""
    if abs(after - before) <= max(MOVED_LEAST, MOVED_SHARE * max(abs(before), abs(after))):
        return 0
    return 1 if after < before else -1


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
