"""What is charged where no engine reports a cost: the rate of the model, of one sequence."""

from __future__ import annotations

from appliance.gateway.access.written_rate import WrittenRate


def test_a_model_that_nobody_measured_writes_ten_tokens_a_second_and_sequence():
    rate = WrittenRate()
    assert rate.written("m", sequences=1, for_s=3.0) == 30 and rate.written("m", sequences=4, for_s=3.0) == 120
    rate.answered("m", 7, sequences=1, took_s=0.001)
    rate.answered("m", 700, sequences=1, took_s=0.0)
    assert rate.written("m", sequences=1, for_s=3.0) == 30, "too short to tell, and one whose time is unknown"


def test_the_rate_is_of_one_sequence_and_smoothed():
    rate = WrittenRate()
    rate.answered("m", 400, sequences=4, took_s=1.0)
    assert rate.written("m", sequences=1, for_s=1.0) == 100, "four answers at once are no faster each"
    rate.answered("m", 200, sequences=1, took_s=1.0)
    assert rate.written("m", sequences=1, for_s=1.0) == 110
    assert rate.written("other", sequences=1, for_s=1.0) == 10


def test_a_short_answer_counts_for_less():
    rate = WrittenRate()
    rate.answered("m", 1000, sequences=1, took_s=10.0)
    for _ in range(10):
        rate.answered("m", 8, sequences=1, took_s=20.0)  # a long prompt
    assert rate.written("m", sequences=1, for_s=1.0) > 85, "it was 35"
