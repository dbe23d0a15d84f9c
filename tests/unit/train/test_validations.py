"""Which validation of a run was the best."""

import pytest

from train.state.snapshot import Validations


@pytest.mark.parametrize(
    ("key", "values", "best", "since"),
    [
        ("loss", {}, 0, 0),
        ("loss", {0: 0.1, 5: 2.0, 10: 1.5, 15: 1.5, 20: float("nan")}, 10, 2),
        ("loss", {5: 2.0, 10: 1.5, 25: 1.0}, 25, 0),
        ("mean_reward", {5: 0.2, 10: 0.9, 15: 0.5}, 10, 1),
    ],
)
def test_best_step_is_first_of_equals_and_never_base(key, values, best, since):
    found = Validations()
    for step, value in values.items():
        found.add(step, {"loss": 0.0, key: value})
    assert (found.best_step, found.since_best) == (best, since)
