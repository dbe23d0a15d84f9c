"""What would end an engine within a step, or hold it up, is refused or ends its own request."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import bad_words

from serve.vllm import request_bounds


class Slow:
    """A grammar whose steps take the times of `clock`."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.clock[0] += tokens[0] / 1000
        return True

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        self.clock[0] += bitmask / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_a_grammar_that_takes_too_long_ends_its_own_request(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    request_bounds.bound_time(bounded)
    quick, slow = bounded(clock), bounded(clock)
    for _ in range(10_000):
        assert quick.accept_tokens("r", [15])
    steps = 0
    while slow.accept_tokens("r", [60]):
        steps += 1
    assert steps == pytest.approx(request_bounds.MOST_BEYOND_S / 0.04, abs=1)


def test_one_whose_masks_take_too_long_does_so_too(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    request_bounds.bound_time(bounded)
    quick, slow = bounded(clock), bounded(clock)
    for _ in range(10_000):
        quick.fill_bitmask(250, 0)
        assert quick.accept_tokens("r", [1])
    steps = 0
    while slow.accept_tokens("r", [1]):
        slow.fill_bitmask(500, 0)
        steps += 1
    assert steps == 3


class Letters:
    """A tokenizer with a token for each character."""

    max_token_id = 255

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


class Processor:
    """Makes parameters as the frontend does: with the model's settings, then with its tokenizer."""

    def __init__(self, known: int) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: known)

    def process_inputs(self, parameters: SamplingParams) -> Any:
        parameters.update_from_generation_config({"eos_token_id": [2, 200]}, 2)
        parameters.update_from_tokenizer(Letters())
        return SimpleNamespace(sampling_params=parameters)


@pytest.fixture
def bounded() -> Any:
    made = type("Bounded", (Processor,), {})
    request_bounds.bound_forbidden(made)
    return made


def test_bound_forbidden_refuses_more_than_a_gpus_runner_has_room_for(bounded: Any) -> None:
    states: Any = object.__new__(bad_words.BadWordsState)  # its rows are on a GPU
    states.num_bad_words = SimpleNamespace(np=[0])
    states.bad_word_token_ids = states.bad_word_offsets = SimpleNamespace(stage_write=lambda *_: None)
    most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    fits = bounded(256).process_inputs(SamplingParams(bad_words=["x" * 256, "y" * (most - 256)])).sampling_params
    assert states.add_request(0, fits)
    with pytest.raises(VLLMValidationError) as refused:
        bounded(256).process_inputs(SamplingParams(bad_words=["x" * 256, "y" * (most - 255)]))
    assert refused.value.parameter == "bad_words"
    fits._bad_words_token_ids.append([1])
    with pytest.raises(ValueError, match="Too many total bad word tokens"):
        states.add_request(0, fits)


def test_bound_forbidden_drops_tokens_that_the_model_lacks(bounded: Any) -> None:
    """vLLM's kernel for GPUs stores at the token's place in the row of logits and does not ask how long it is."""
    forbids = SamplingParams(bad_words=["ab", "a\xff", "\xff"], min_tokens=1)
    made = bounded(128).process_inputs(forbids).sampling_params
    assert made.bad_words_token_ids == [[97, 98]] and made.all_stop_token_ids == {2}
    nothing = bounded(128).process_inputs(SamplingParams()).sampling_params
    assert nothing.bad_words_token_ids is None and nothing.all_stop_token_ids == {2}


def test_bound_tokens_refuses_a_token_without_a_row_in_the_embedding() -> None:
    """vLLM's own check goes by what the tokenizer knows, if that is more."""
    renders = type("Bounded", (HfRenderer,), {})
    request_bounds.bound_tokens(renders)
    renderer: Any = object.__new__(renders)
    renderer.tokenizer = SimpleNamespace(max_token_id=262_144)
    for images in (False, True):
        renderer.model_config = SimpleNamespace(get_vocab_size=lambda: 262_144, is_multimodal_model=images)
        renderer.validate_token_ids([5, 262_143])
        HfRenderer.validate_token_ids(renderer, [5, 262_144])
        with nullcontext() if images else pytest.raises(VLLMValidationError, match="262144"):
            renderer.validate_token_ids([5, 262_144])
