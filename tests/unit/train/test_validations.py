"""Which validation of a run was the best, from its event log."""

from train.trainer.event_log import EventLog
from train.trainer.validations import Validations


def log(folder):
    return EventLog(folder, lambda event, **data: None)


def test_the_best_is_the_first_of_equals_and_the_base_is_none(tmp_path):
    found = Validations(tmp_path, 0)
    assert (found.best_step, found.since_best) == (0, 0)
    for step, loss in ((0, 0.1), (5, 2.0), (10, 1.5), (15, 1.5), (20, float("nan"))):
        found.add(step, {"loss": loss})
    assert (found.best_step, found.since_best) == (10, 2)
    found.add(25, {"loss": 1.0})
    assert (found.best_step, found.since_best) == (25, 0)


def test_rewards_are_better_when_they_are_higher(tmp_path):
    found = Validations(tmp_path, 0)
    for step, reward in ((5, 0.2), (10, 0.9), (15, 0.5)):
        found.add(step, {"mean_reward": reward, "loss": 0.0})
    assert (found.best_step, found.since_best) == (10, 1)


def test_a_run_that_goes_on_knows_what_it_found_and_forgets_what_is_done_anew(tmp_path):
    emit = log(tmp_path)
    for step, loss in ((0, 9.0), (5, 2.0), (10, 1.0), (15, 0.5), (20, 3.0)):
        emit("validation", step=step, total_steps=40, loss=loss)
    emit("published", step=10, version="step-10")
    found = Validations(tmp_path, 12)  # it died after step 20; the last snapshot is of step 12
    assert (found.best_step, found.since_best) == (10, 0)
    assert found.published(10) and not found.published(15)
    emit("validation", step=15, total_steps=40, loss=1.5)  # again, by another world
    assert (Validations(tmp_path, 17).best_step, Validations(tmp_path, 17).since_best) == (10, 1)
