"""Whose requests the next step computes, which requests belong together, and when the old weights have to go."""

from __future__ import annotations

import pytest

from serve.cpu.finishing import LOW_MEMORY_FRACTION, Weights, answer_of, next_turn, why_move
from serve.load.swap_path import choose_path

OLD, NEW = Weights.OLD, Weights.NEW


def test_sides_that_both_have_work_take_turns():
    turns, last = [], NEW
    for _ in range(6):
        last = next_turn(last, old_ready=True, new_ready=True)
        turns.append(last)
    assert turns == [OLD, NEW] * 3


@pytest.mark.parametrize("last", [OLD, NEW])
def test_a_side_alone_has_every_step(last):
    assert next_turn(last, old_ready=True, new_ready=False) is OLD
    assert next_turn(last, old_ready=False, new_ready=True) is NEW
    assert next_turn(last, old_ready=False, new_ready=False) is last


def test_choices_and_prompts_of_one_answer_belong_together():
    chat = ["chatcmpl-9f3c-0a1b2c3d", "0_chatcmpl-9f3c-0a1b2c3d", "11_chatcmpl-9f3c-0a1b2c3d"]
    assert {answer_of(name) for name in chat} == {"chatcmpl-9f3c"}
    prompts = ["cmpl-77ab-0-0a1b2c3d", "cmpl-77ab-1-ffffffff", "1_cmpl-77ab-1-ffffffff"]
    assert {answer_of(name) for name in prompts} == {"cmpl-77ab"}
    assert answer_of("chatcmpl-9f3d-0a1b2c3d") != answer_of(chat[0])
    assert answer_of("mine") == "mine"


def test_old_weights_go_when_time_or_memory_is_up():
    def why(now_s=0.0, free_bytes=50):
        return why_move(now_s=now_s, deadline_s=120.0, free_bytes=free_bytes, total_bytes=100)

    assert why() is None and why(now_s=119.9) is None
    assert why(now_s=120.0) == "time was up"
    assert why(free_bytes=LOW_MEMORY_FRACTION * 100) is None
    assert why(free_bytes=LOW_MEMORY_FRACTION * 100 - 1) == "memory was short"


def test_a_version_is_staged_where_layout_and_memory_allow():
    facts = {"bytes": 100, "stageable": True, "layerwise_reason": None}
    assert choose_path("auto", facts, 150, 1.5)[0] == "staged"
    assert choose_path("auto", facts, 149, 1.5) == (
        "in-place",
        "149 bytes free, 150 needed in addition to the serving weights",
    )
    assert choose_path("staged", facts, 0, 1.5) == ("staged", "asked for")
    assert choose_path("staged", {**facts, "stageable": False}, 150, 1.5)[0] == "in-place"
    assert choose_path("staged", {**facts, "layerwise_reason": "compiled"}, 150, 1.5) == ("layerwise", "compiled")
