"""The verdict on a run, from its curves alone."""

from types import SimpleNamespace

import pytest

from train.plan.verdict import judge

SETTINGS = {"n_epochs": 4, "learning_rate": 1e-4}


def row(step, loss=None, valid_loss=None, measured=None, valid_measured=None):
    return SimpleNamespace(
        step=step, loss=loss, valid_loss=valid_loss, measured=measured, valid_measured=valid_measured
    )


def run(losses, valid=(), **measured):
    """Steps with these training losses; valid: a validation before the first step and after each epoch."""
    each = len(losses) // max(1, len(valid) - 1)
    found = dict(zip(range(0, len(losses) + 1, each), valid, strict=False)) if valid else {}
    rows = [row(0, valid_loss=found.get(0))]
    for number, loss in enumerate(losses, 1):
        values = {name.replace("__", "/"): curve[number - 1] for name, curve in measured.items()}
        rows.append(row(number, loss, found.get(number), values))
    return rows


FALLS = [2.0, 1.6, 1.2, 0.8, 0.5, 0.3, 0.15, 0.1, 0.06, 0.05, 0.05, 0.05]
FALLS_ON = [3.0, 2.9, 2.8, 2.5, 2.4, 2.3, 2.0, 1.9, 1.8, 1.4, 1.3, 1.2]
FLAT = [2.0, 2.01, 1.99, 2.0, 2.02, 1.98, 2.0, 2.0, 1.99, 2.01, 2.0, 1.97]
RISES = [2.0, 2.0, 2.1, 2.4, 2.8, 3.5, 4.0, 4.2, 5.0, 5.5, 6.0, 6.5]


@pytest.mark.parametrize(
    ("losses", "valid", "code"),
    [
        (FALLS, (), "learned"),
        (FALLS, (2.0, 1.2, 0.8, 0.6, 0.5), "generalises"),
        (FALLS, (2.0, 1.2, 0.9, 1.1, 1.4), "by_heart"),
        (FALLS_ON, (), "still_falling"),
        (FALLS_ON, (3.0, 2.7, 2.4, 2.2, 2.2), "generalises"),
        (FLAT, (), "did_not_move"),
        (RISES, (), "got_worse"),
        (FLAT, (2.0, 2.2, 2.4, 2.7, 3.0), "got_worse"),
        ([0.03] * 12, (), "learned"),
        (FALLS[:3], (), "too_short"),
    ],
)
def test_verdict_follows_the_losses(losses, valid, code):
    found = judge("supervised", run(losses, valid), SETTINGS)
    assert found.code == code and found.text.count("\n") == 0


def test_verdict_counts_a_noisy_single_epoch_as_learned():
    noisy = [2.0 - 0.05 * n + (0.3 if n % 2 else -0.3) for n in range(20)]
    assert judge("supervised", run(noisy), SETTINGS | {"n_epochs": 1}).code == "learned"


def test_verdict_names_the_setting_to_change():
    assert "n_epochs to 8" in judge("supervised", run(FALLS_ON), SETTINGS).text
    assert "learning_rate to 3.0e-04" in judge("supervised", run(FLAT), SETTINGS).text
    assert "learning_rate to 1.0e-05" in judge("supervised", run(RISES), SETTINGS).text
    assert "n_epochs" not in judge("supervised", run(FALLS_ON), SETTINGS | {"n_epochs": 50}).text


def pairs(margins, right, valid=None):
    rows = run([0.69] * len(margins), (), rewards__margins=margins, rewards__accuracies=right)
    if valid is not None:
        rows[-1] = row(rows[-1].step, 0.69, 0.6, rows[-1].measured, {"rewards/margins": valid})
    return rows


@pytest.mark.parametrize(
    ("margins", "right", "valid", "code"),
    [
        ([0.0] * 12, [0.0] * 12, None, "did_not_move"),
        ([0.2 * n for n in range(12)], [1.0] * 12, None, "learned"),
        ([0.05 * n for n in range(12)], [0.7] * 12, None, "still_falling"),
        ([0.2 * n for n in range(12)], [1.0] * 12, 1.5, "generalises"),
        ([0.2 * n for n in range(12)], [1.0] * 12, 0.01, "by_heart"),
        ([-0.1 * n for n in range(12)], [0.1] * 12, None, "got_worse"),
    ],
)
def test_verdict_on_pairs_follows_the_margin(margins, right, valid, code):
    assert judge("dpo", pairs(margins, right, valid), SETTINGS).code == code


@pytest.mark.parametrize(
    ("method", "name", "values", "code"),
    [
        ("reinforcement", "mean_reward", [0.2, 0.1, 0.3, 0.2, 0.5, 0.6, 0.8, 0.9], "learned"),
        ("reinforcement", "mean_reward", [0.5, 0.1, 0.9, 0.4, 0.5, 0.3, 0.6, 0.4], "did_not_move"),
        ("reinforcement", "mean_reward", [0.9, 0.8, 0.9, 0.6, 0.4, 0.3, 0.1, 0.2], "got_worse"),
        ("distillation", "reverse_kl", [2.0, 1.9, 1.8, 1.2, 1.0, 0.8, 0.4, 0.3], "learned"),
        ("distillation", "reverse_kl", [0.3, 0.3, 0.5, 0.8, 1.0, 1.5, 1.8, 2.0], "got_worse"),
    ],
)
def test_verdict_on_own_answers_follows_the_score(method, name, values, code):
    assert judge(method, run([0.0] * 8, (), **{name: values}), SETTINGS).code == code


@pytest.mark.parametrize("steps", [1, 8])
def test_verdict_equal_rewards_is_no_signal(steps):
    rows = run([0.0] * steps, (), mean_reward=[1.0] * steps, equal_rewards=[1.0] * steps)
    assert judge("reinforcement", rows, SETTINGS).code == "no_signal"
    rows[1] = row(1, 0.1, None, {"mean_reward": 0.5, "equal_rewards": 0.5})
    assert judge("reinforcement", rows, SETTINGS).code != "no_signal"
