"""Which validation of a run was the best, from its event log."""

import pytest

from train.trainer.event_log import EventLog
from train.trainer.validations import Validations


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


def test_resumed_run_forgets_validations_of_steps_done_again(tmp_path):
    emit = EventLog(tmp_path, lambda event, **data: None)
    for step, loss in ((0, 9.0), (5, 2.0), (10, 1.0), (15, 0.5), (20, 3.0)):
        emit("validation", step=step, total_steps=40, loss=loss)
    found = Validations()
    found.read(tmp_path, 12)  # it died after step 20; the last snapshot is of step 12
    assert (found.best_step, found.since_best, found.published(tmp_path)) == (10, 0, False)
    emit("published", step=10, version="step-10")
    emit("validation", step=15, total_steps=40, loss=1.5)  # again, by another world
    again = Validations()
    again.read(tmp_path, 17)
    assert (again.best_step, again.since_best, again.published(tmp_path)) == (10, 1, True)
