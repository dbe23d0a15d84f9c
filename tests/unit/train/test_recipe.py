"""The automatic learning rate lies where it was measured and where others publish it."""

import pytest

from train.plan.recipe import epochs, peak_rate

SMOL = 134_515_008


def test_small_jobs_get_the_rates_that_were_measured_on_a_real_model():
    assert peak_rate(SMOL, 300, full=False) == pytest.approx(2.9e-4, rel=0.01)
    assert peak_rate(SMOL, 300, full=True) == pytest.approx(7.2e-5, rel=0.01)


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
        assert lowest <= peak_rate(parameters, tokens, full=full) <= highest


def test_epochs_few_rows_are_seen_more_often():
    for full in (True, False):
        passes = [epochs(rows, full=full) for rows in (1, 12, 31, 60, 100, 150, 199, 200, 2000, 20_000)]
        assert passes == sorted(passes, reverse=True) and passes[-4:] == [5, 3, 2, 1]
        assert all(rows * epochs(rows, full=full) <= 1000 for rows in (1, 31, 60, 100, 199))
    assert epochs(31, full=False) > epochs(31, full=True) > 5
