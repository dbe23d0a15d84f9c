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


def test_the_rate_is_that_of_the_longest_of_several():
    """Of four that end by themselves three end before the answer does: by their mean, whoever left paid half."""
    rate = WrittenRate()
    rate.answered("m", 400, sequences=4, took_s=2.0, longest=200)
    assert rate.written("m", sequences=4, for_s=1.0) == 400
    for _ in range(100):
        rate.answered("m", 400, sequences=4, took_s=2.0)  # a stream does not say which was the longest
    assert rate.written("m", sequences=4, for_s=1.0) == 400
    rate.answered("m", 2000, sequences=4, took_s=1.0)
    assert rate.written("m", sequences=1, for_s=1.0) == 140


def test_events_have_as_many_tokens_as_in_streams_that_told():
    rate = WrittenRate()
    assert rate.in_events("m", 50) == 50
    for _ in range(100):
        rate.streamed("m", 300, 100)
    assert rate.in_events("m", 50) == 150 and rate.in_events("other", 50) == 50
    for _ in range(100):
        rate.streamed("m", 100, 105)  # its first and last events hold none
    assert rate.in_events("m", 50) == 50


def test_a_short_answer_counts_for_less():
    rate = WrittenRate()
    rate.answered("m", 1000, sequences=1, took_s=10.0)
    for _ in range(10):
        rate.answered("m", 8, sequences=1, took_s=20.0)  # a long prompt
    assert rate.written("m", sequences=1, for_s=1.0) > 85, "it was 35"
