"""The automatic learning rate lies where it was measured and where others publish it."""

import pytest

from train.plan.auto import DatasetStats, ModelStats, resolve
from train.plan.recipe import FEW_ROWS, epochs, learning_rate

SMOL = 134_515_008


def test_small_jobs_get_the_rates_that_were_measured_on_a_real_model():
    assert learning_rate(SMOL, 300, full=False) == pytest.approx(2.9e-4, rel=0.01)
    assert learning_rate(SMOL, 300, full=True) == pytest.approx(7.2e-5, rel=0.01)


@pytest.mark.parametrize(
    ("parameters", "full", "lowest", "highest"),
    [
        (8e9, True, 5e-6, 3e-5),  # Tulu 3 5e-6, torchtune and TRL 2e-5
        (8e9, False, 9e-5, 3e-4),  # unsloth 2e-4, torchtune and Tinker 3e-4
        (70e9, True, 3e-6, 2e-5),
        (70e9, False, 5e-5, 3e-4),
        (1e9, False, 1.5e-4, 1e-3),
    ],
)
def test_at_every_batch_rates_lie_within_what_is_published(parameters, full, lowest, highest):
    for tokens in (100, 8192, 77_000, 10**6):
        assert lowest <= learning_rate(parameters, tokens, full=full) <= highest


def test_a_rate_grows_with_the_step_by_its_root_up_to_a_bound_and_falls_with_the_model():
    at = [learning_rate(8e9, tokens, full=False) for tokens in (1, 8192, 4 * 8192, 10**9)]
    assert at[0] == at[1] and at[2] == pytest.approx(2 * at[1]) and at[3] == pytest.approx(3 * at[1])
    for full in (True, False):
        sizes = [learning_rate(n, 300, full=full) for n in (1, 10**8, 10**9, 10**10, 10**11)]
        assert sizes == sorted(sizes, reverse=True)
    ratios = [learning_rate(n, 300, full=False) / learning_rate(n, 300, full=True) for n in (SMOL, 1e9, 7e9)]
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(10)


def test_more_data_makes_larger_steps_and_a_higher_rate():
    model = ModelStats(8_000_000_000, 8192, "cuda")
    found = [
        resolve({}, DatasetStats(examples, 500 * examples, 2000), model, 8)["learning_rate"]
        for examples in (300, 1000, 100_000)
    ]
    assert found[0] < found[1] < found[2] == pytest.approx(3 * learning_rate(8_000_000_000, 1, full=False))
    given = {"learning_rate": 1e-5, "learning_rate_multiplier": 2}
    assert resolve(given, DatasetStats(100_000, 50_000_000, 2000), model, 8)["learning_rate"] == pytest.approx(2e-5)


def test_epochs_few_rows_are_seen_more_often():
    for full in (True, False):
        passes = [epochs(rows, full=full) for rows in (1, 12, 31, 60, 100, 150, 199, 200, 2000, 20_000)]
        assert passes == sorted(passes, reverse=True) and passes[-4:] == [5, 3, 2, 1]
        assert all(rows * epochs(rows, full=full) <= 1000 for rows in (1, 31, 60, 100, 199))
    assert epochs(31, full=False) > epochs(31, full=True) > 5


def test_learning_rate_of_few_rows_is_higher_for_adapters_alone():
    few, many = (learning_rate(SMOL, 300, full=False, rows=rows) for rows in (31, FEW_ROWS))
    assert few == pytest.approx(1.5 * many)
    assert learning_rate(SMOL, 300, full=True, rows=31) == learning_rate(SMOL, 300, full=True, rows=FEW_ROWS)
