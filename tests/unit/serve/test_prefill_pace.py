"""A step is as long as somebody may wait for it, and no shorter than it must be."""

from __future__ import annotations

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
