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
    rule: Callable[[Sequence[Step], Mapping[str, Any]], Verdict] = _RULES.get(method, _supervised)
    found = _no_signal(steps)
    if found is None and done < FEWEST_STEPS:
        return Verdict("too_short", f"{_count(done, 'step')} cannot show whether the model learned: raise n_epochs.")
    return found or rule(steps, settings)


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


def _supervised(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    train = _curve(steps, "loss", _from_train)
    if not train:
        return Verdict("too_short", "No loss was reported, so nothing is known of what the model learned.")
    start, end = _start(train), _epochs(train, settings)[-1]
    moved = f"training loss {start:.2f} → {end:.2f}"
    valid = _curve(steps, "loss", _from_valid)
    if end > start and _differ(start, end):
        rate = settings["learning_rate"] / 10
        return Verdict("got_worse", f"The model got worse: {moved}. Lower learning_rate to {rate:.1e}.")
    if len(valid) > 1:
        return _with_validation(train, valid, moved, settings)
    if not _differ(start, end):
        if start < KNOWN_LOSS:
            return Verdict("learned", f"The model knew the training rows before the job: {moved}.")
        return _did_not_move(moved, settings)
    if (more := _falls(train, settings)) is not None:
        return Verdict("still_falling", f"The model is still learning: {moved}, falling to the end. {more}")
    return Verdict(
        "learned",
        f"The model learned the training rows: {moved}. Whether it answers other questions, a validation_file would "
        "tell.",
    )


def _with_validation(
    train: Sequence[float], valid: Sequence[tuple[int, float]], moved: str, settings: Mapping[str, Any]
) -> Verdict:
    start, end = _start(train), _epochs(train, settings)[-1]
    (_, before), (_, after) = valid[0], valid[-1]
    best_step, best = min(valid, key=lambda one: one[1])
    curves = f"{moved}, validation loss {before:.2f} → {after:.2f}"
    learned = end < start and _differ(start, end)
    if after > best and _differ(best, after) and learned:
        at = "before the first step" if best_step == 0 else f"at step {best_step}"
        return Verdict(
            "by_heart",
            f"The model learned the training rows by heart: {curves}, lowest ({best:.2f}) {at}. Fewer n_epochs, "
            "publish 'best' or more varied rows help.",
        )
    if after > before and _differ(before, after):
        rate = settings["learning_rate"] / 10
        return Verdict("got_worse", f"The model got worse: {curves}. Lower learning_rate to {rate:.1e}.")
    if not _differ(before, after):
        if not learned:
            return _did_not_move(curves, settings)
        return Verdict(
            "by_heart",
            f"The model learned the training rows, and the validation file did not gain by it: {curves}. More varied "
            "rows, nearer to the questions of the validation file, help.",
        )
    if (more := _falls(train, settings)) is not None and best_step == valid[-1][0]:
        return Verdict("still_falling", f"The model learned, generalises and is still learning: {curves}. {more}")
    return Verdict("generalises", f"The model learned and generalises: {curves}.")


def _pairs(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    margins = _curve(steps, "rewards/margins", _from_train)
    order = _curve(steps, "rewards/accuracies", _from_train)
    if not margins or not order:
        return _supervised(steps, settings)
    each = _epochs(margins, settings)
    end, share = each[-1], _epochs(order, settings)[-1]
    moved = f"margin of the preferred answers {end:.2f}, {share:.0%} of the pairs in the right order"
    if end < -MOVED_MARGIN:
        rate = settings["learning_rate"] / 10
        return Verdict("got_worse", f"The model prefers the wrong answers: {moved}. Lower learning_rate to {rate:.1e}.")
    if end < MOVED_MARGIN:
        return _did_not_move(moved, settings)
    valid = _curve(steps, "rewards/margins", _from_valid)
    if valid:
        moved += f"; margin {valid[-1][1]:.2f} in the validation file"
        if valid[-1][1] < MOVED_MARGIN * min(1.0, end):
            return Verdict(
                "by_heart",
                f"The model learned the training pairs by heart: {moved}. Fewer n_epochs or more varied pairs help.",
            )
    if len(each) > 1 and share < SURE_OF_PAIRS and end - each[-2] > FALLING_SHARE * end:
        return Verdict("still_falling", f"The model is still learning: {moved}, growing to the end. {_more(settings)}")
    if valid:
        return Verdict("generalises", f"The model learned and generalises: {moved}.")
    return Verdict(
        "learned",
        f"The model learned the training pairs: {moved}. Whether it prefers well elsewhere, a validation_file would "
        "tell.",
    )


def _rewards(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    return _noisy(steps, settings, "mean_reward", "mean reward", 1)


def _distillation(steps: Sequence[Step], settings: Mapping[str, Any]) -> Verdict:
    return _noisy(steps, settings, "reverse_kl", "distance to the teacher", -1)


def _noisy(steps: Sequence[Step], settings: Mapping[str, Any], name: str, called: str, better: int) -> Verdict:
    """For what is measured on the model's own answers: the first and the last quarter of the steps are compared, with
    their spread. better: 1 if a larger value is better, -1 if a smaller one is."""
    train = _curve(steps, name, _from_train)
    quarter = max(2, len(train) // 4)
    if len(train) < 2 * quarter:
        return Verdict("too_short", f"{_count(len(train), 'step')} cannot show whether the model learned.")
    first, last = train[:quarter], train[-quarter:]
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / quarter)
    gain = better * (fmean(last) - fmean(first))
    moved = f"{called} {fmean(first):.2f} → {fmean(last):.2f}"
    valid = _curve(steps, name, _from_valid)
    if len(valid) > 1:
        moved += f", in the validation file {valid[0][1]:.2f} → {valid[-1][1]:.2f}"
    least = max(MOVED_REWARD, SURE * error)
    if gain < -least:
        rate = settings["learning_rate"] / 10
        return Verdict("got_worse", f"The model got worse: {moved}. Lower learning_rate to {rate:.1e}.")
    if gain < least:
        return _did_not_move(moved, settings)
    if len(valid) > 1:
        gained = better * (valid[-1][1] - valid[0][1])
        if gained < MOVED_REWARD:
            return Verdict("by_heart", f"The model learned the training prompts alone: {moved}. More prompts help.")
        return Verdict("generalises", f"The model learned and generalises: {moved}.")
    return Verdict(
        "learned",
        f"The model learned the training prompts: {moved}. Whether it does better at others, a validation_file would "
        "tell.",
    )


_RULES: dict[str, Callable[[Sequence[Step], Mapping[str, Any]], Verdict]] = {
    "dpo": _pairs,
    "reinforcement": _rewards,
    "distillation": _distillation,
}


def _did_not_move(moved: str, settings: Mapping[str, Any]) -> Verdict:
    rate = HIGHER_RATE * settings["learning_rate"]
    return Verdict("did_not_move", f"The model did not learn: {moved}. Raise learning_rate to {rate:.1e}.")


def _falls(train: Sequence[float], settings: Mapping[str, Any]) -> str | None:
    """What to do if the training loss still falls; None if it does not."""
    each = _epochs(train, settings)
    if len(each) < 2 or each[-1] < KNOWN_LOSS:
        return None
    return _more(settings) if each[-2] - each[-1] > FALLING_SHARE * each[-2] else None


def _more(settings: Mapping[str, Any]) -> str:
    epochs = min(MOST_EPOCHS, 2 * settings["n_epochs"])
    return f"Raise n_epochs to {epochs}." if epochs > settings["n_epochs"] else "Raise learning_rate."


def _from_train(one: Step, name: str) -> float | None:
    if one.step == 0:
        return None
    return one.loss if name == "loss" else one.measured.get(name)


def _from_valid(one: Step, name: str) -> float | None:
    return one.valid_loss if name == "loss" else one.valid_measured.get(name)


def _curve(steps: Sequence[Step], name: str, read: Callable[[Step, str], float | None]) -> Any:
    """Training values in order, or (step, value) of each validation."""
    found = [(one.step, value) for one in steps if (value := read(one, name)) is not None]
    return found if read is _from_valid else [value for _, value in found]


def _start(train: Sequence[float]) -> float:
    """Loss of the starting model, from the first steps, in which it has hardly moved."""
    return fmean(train[: max(1, len(train) // 20)])


def _epochs(train: Sequence[float], settings: Mapping[str, Any]) -> list[float]:
    """Mean of each epoch: rows differ in loss, and each epoch has all of them. A single epoch has no second value."""
    epochs = settings["n_epochs"]
    if epochs < 2 or len(train) < epochs:
        return [fmean(train[-max(1, len(train) // 10) :])]
    bounds = [round(number * len(train) / epochs) for number in range(epochs + 1)]
    return [fmean(train[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > max(MOVED_LEAST, MOVED_SHARE * max(abs(one), abs(other)))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
