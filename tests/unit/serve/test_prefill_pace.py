"""A step is as long as somebody may wait for it, and no shorter than it must be."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from serve.cpu import prefill_pace
from serve.cpu.finishing_scheduler import FinishingScheduler
from serve.cpu.prefill_pace import PrefillPace


def after(tokens_per_s: float, own_s: float = 0.05, most: int = 2048, writing: int = 1) -> float:
    """How long a step takes in the end, on a machine that takes so long for a token and for a step."""
    pace = PrefillPace(most)
    for _ in range(20):
        tokens = pace.budget(writing)
        took_s = own_s + tokens / tokens_per_s
        pace.computed(tokens, took_s)
    return took_s


@pytest.mark.parametrize("tokens_per_s", [130, 500, 3000])
def test_a_step_takes_as_long_as_it_may(tokens_per_s: float) -> None:
    assert 0.6 < after(tokens_per_s) / min(prefill_pace.WRITING_S, 2048 / tokens_per_s) < 1.2
    assert 0.6 < after(tokens_per_s, writing=0) / min(prefill_pace.NOBODY_WRITES_S, 2048 / tokens_per_s) < 1.2


def test_a_fast_machine_computes_all_that_the_engine_is_made_for() -> None:
    pace = PrefillPace(2048)
    pace.computed(256, 0.01)
    assert pace.budget(5) == 2048


def test_a_slow_one_goes_on() -> None:
    pace = PrefillPace(2048)
    pace.computed(256, 100.0)
    assert pace.budget(3) == 3 + prefill_pace.LEAST


def test_steps_without_prompts_say_nothing() -> None:
    pace = PrefillPace(2048)
    pace.computed(1, 0.06)
    assert pace.budget(1) == 1 + prefill_pace.FIRST


def request(tokens: int, computed: int) -> Any:
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed)


def shared(running: list[Any], waiting: list[Any]) -> Any:
    """The scheduler after it has shared out a step of 150 tokens, and one for each answer."""
    scheduler = SimpleNamespace(
        running=running,
        waiting=deque(waiting),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        owner_of=lambda request: 1,
    )
    pace = PrefillPace(2048)
    pace.computed(200, 1.0)
    FinishingScheduler._share_the_step(scheduler, pace)  # type: ignore[arg-type]
    return scheduler


def test_answers_that_are_written_come_before_prompts() -> None:
    """vLLM gives tokens away from the front: behind a long prompt nothing was left for them."""
    prompt, other, answer, second = request(1700, 0), request(900, 100), request(50, 49), request(60, 59)
    made = shared([prompt, answer, other, second], [])
    assert made.running == [answer, second, prompt, other]
    assert made.max_num_scheduled_tokens == 2 + 150 and made.scheduler_config.long_prefill_token_threshold == 0


def test_a_prompt_leaves_half_to_who_waits() -> None:
    made = shared([request(50, 49), request(1700, 0)], [request(20, 0)])
    assert made.scheduler_config.long_prefill_token_threshold == 75


def answered(fixed_s: float, answer_s: float, noise: float = 0.0) -> tuple[float, int]:
    """Tokens a second of 63 answers that take turns, over those of 63 in each step; and how many the last step had."""
    drawn, pace, written, took_s, in_step = random.Random(7), PrefillPace(2048), 0, 0.0, 63
    for _ in range(300):
        seconds = (fixed_s + in_step * answer_s) * drawn.uniform(1 - noise, 1 + noise)
        pace.computed(in_step, seconds, answers_alone=True)
        written, took_s = written + in_step, took_s + seconds
        in_step = min(63, pace.answers() or 63)
    return written / took_s * (fixed_s + 63 * answer_s) / 63, in_step


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_turns_of_answers_cost_little_where_a_step_takes_long_whatever_it_has(noise: float) -> None:
    """The fewer answers, the fewer tokens a second, and the fewer answers: down to 16, at 43 tokens a second of 103."""
    share, _ = answered(0.3, 0.005, noise)
    assert share > 0.85


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_answers_are_what_takes_time_steps_of_them_are_short(noise: float) -> None:
    share, in_step = answered(0.03, 1 / 130, noise)
    assert in_step < 40 and share > 0.85
