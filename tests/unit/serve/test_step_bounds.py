"""What one request takes of an engine's steps is bounded, whatever it asks for."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import bad_words, logit_bias

from serve.vllm import step_bounds

# One token for each character, and one of 50 spaces.
_VOCABULARY = [chr(code) for code in range(32, 127)] + [" " * 50, "\n", "</s>"]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> xgrammar.GrammarCompiler:
    """Of a class with the bound; the library's own stays as it is."""
    bounded = type("Bounded", (xgrammar.GrammarCompiler,), {})
    step_bounds.bound_whitespace(bounded)
    info = xgrammar.TokenizerInfo(_VOCABULARY, stop_token_ids=[len(_VOCABULARY) - 1])
    return bounded(info, max_threads=1)


def accepts(compiled: Any, text: str) -> bool:
    return xgrammar.GrammarMatcher(compiled).accept_string(text)


ODD_KEYS = [
    {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^a$"}},
]


@pytest.mark.parametrize("schema", ODD_KEYS)
def test_a_run_of_whitespace_ends(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any]) -> None:
    compiled = compiler.compile_json_schema(json.dumps(schema))
    assert accepts(compiled, '{"a":1,\n' + " " * 8 + '"a" : 2}')
    # Two rules may each take a run of whitespace here; unbounded, each further one cost more than the last.
    assert not accepts(compiled, '{"a":1,' + " " * (2 * step_bounds.WHITESPACE + 1))


def test_also_in_the_arguments_of_a_call(compiler: xgrammar.GrammarCompiler) -> None:
    content = {"type": "json_schema", "json_schema": ODD_KEYS[0], "max_whitespace_cnt": None}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    assert accepts(compiled, '<f>{"a":1, "a":2}</f>')
    assert not accepts(compiled, '<f>{"a":1,' + " " * (2 * step_bounds.WHITESPACE + 1))


def test_a_schema_within_a_tag_stays_as_it_is() -> None:
    schema = {"type": "json_schema", "properties": {"type": {"const": "json_schema"}}}
    inner = {"type": "json_schema", "json_schema": schema}
    bounded = step_bounds.with_bounds({"format": {"content": [inner, {"type": "any_text"}]}})
    assert bounded["format"]["content"] == [
        {**inner, "max_whitespace_cnt": step_bounds.WHITESPACE},
        {"type": "any_text"},
    ]


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
    step_bounds.bound_time(bounded)
    quick, slow = bounded(clock), bounded(clock)
    for _ in range(10_000):
        assert quick.accept_tokens("r", [15])
    steps = 0
    while slow.accept_tokens("r", [60]):
        steps += 1
    assert steps == pytest.approx(step_bounds.MOST_BEYOND_S / 0.04, abs=1)


def test_one_whose_masks_take_too_long_does_so_too(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    step_bounds.bound_time(bounded)
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


def bounded_parameters(**given: Any) -> SamplingParams:
    """As the frontend makes them of a request: with the model's settings, then with its tokenizer."""
    parameters = type("Bounded", (SamplingParams,), {})
    step_bounds.bound_forbidden(parameters)
    made = parameters(**given)
    made.update_from_generation_config({"eos_token_id": list(range(100, 180))}, 2)
    made.update_from_tokenizer(Letters())
    return made


def test_more_than_a_gpus_runner_has_room_for_is_refused_before_it_ends_the_engine() -> None:
    states = object.__new__(bad_words.BadWordsState)  # its rows are on a GPU
    states.num_bad_words = SimpleNamespace(np=[0])
    states.bad_word_token_ids = states.bad_word_offsets = SimpleNamespace(stage_write=lambda *_: None)
    room = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    assert logit_bias.MAX_NUM_STOP_TOKEN_IDS == step_bounds.STOP_IDS
    fits = bounded_parameters(bad_words=["x" * 256, "y" * (room - 256)])
    assert states.add_request(0, fits)
    with pytest.raises(VLLMValidationError, match=f"1025 tokens long together.*at most {room}") as refused:
        bounded_parameters(bad_words=["x" * 256, "y" * (room - 255)])
    assert refused.value.parameter == "bad_words"
    fits._bad_words_token_ids.append([1])
    with pytest.raises(ValueError, match="Too many total bad word tokens"):
        states.add_request(0, fits)


def test_ids_that_end_an_answer_are_bounded_where_a_gpus_runner_forbids_them() -> None:
    ends = list(range(64))
    assert len(bounded_parameters(stop_token_ids=ends).all_stop_token_ids) > step_bounds.STOP_IDS
    with pytest.raises(VLLMValidationError, match=r"at most 128 tokens.*these are 14\d"):
        bounded_parameters(stop_token_ids=ends, min_tokens=1)


def test_a_token_that_the_embedding_has_no_row_for_is_refused() -> None:
    """vLLM's own check goes by what the tokenizer knows, if that is more."""
    bounded = type("Bounded", (HfRenderer,), {})
    step_bounds.bound_tokens(bounded)
    renderer = object.__new__(bounded)
    renderer.tokenizer = SimpleNamespace(max_token_id=262_144)
    for vocab, pictures, refused in ((262_144, False, True), (262_100, False, True), (262_144, True, False)):
        renderer.model_config = SimpleNamespace(get_vocab_size=lambda vocab=vocab: vocab, is_multimodal_model=pictures)
        renderer.validate_token_ids([5, 262_143])  # rows are padded to a multiple of 64
        HfRenderer.validate_token_ids(renderer, [5, 262_144])
        with pytest.raises(VLLMValidationError, match="262144") if refused else nullcontext():
            renderer.validate_token_ids([5, 262_144])


class Runner:
    """Of vLLM's model runner what the function asks for, as it is in 0.32: rows of logits from `hidden_states`, and
    results once a prompt is complete."""

    def __init__(self) -> None:
        self.num_prompt_logprobs = {"a": 1, "b": 1}
        self.requests = {"a": SimpleNamespace(num_computed_tokens=0), "b": SimpleNamespace(num_computed_tokens=0)}
        self.prompts = {"a": 700, "b": 40}
        self.begins: dict[str, int] = {}
        self.rows: list[int] = []
        self.got: dict[str, list[int]] = {"a": [], "b": []}

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        complete = {}
        for req_id in list(self.num_prompt_logprobs):
            tokens = num_scheduled_tokens.get(req_id)
            if tokens is None:
                continue
            left = self.prompts[req_id] - self.requests[req_id].num_computed_tokens - 1
            rows = min(tokens, left)
            if tokens > left:
                complete[req_id] = self.got[req_id]
                del self.num_prompt_logprobs[req_id]
            if rows > 0:
                at = self.begins[req_id]
                self.got[req_id] += hidden_states[at : at + rows]
                self.rows.append(rows)
        return complete


def test_logits_of_a_prompt_are_computed_in_slices_and_are_the_same() -> None:
    sliced = type("Sliced", (Runner,), {})
    step_bounds.slice_prompt_logprobs(sliced)
    found = []
    for runner in (Runner(), sliced()):
        got: dict[str, Any] = {}
        for step in ({"x": 1, "a": 300, "b": 40}, {"x": 1, "a": 256}, {"x": 1}, {"x": 1, "a": 144}):
            at = 0
            for req_id in ("x", "a", "b"):
                runner.begins[req_id] = at
                at += step.get(req_id, 0)
            first = sum(step.values()) * 1000  # the states of a step differ from those of another
            got |= runner._get_prompt_logprobs_dict(list(range(first, first + at)), step)
            for req_id, request in runner.requests.items():
                request.num_computed_tokens += step.get(req_id, 0)
        assert runner.num_prompt_logprobs == {}
        found.append((got, max(runner.rows)))
    assert found[0][0] == found[1][0] and len(found[0][0]["a"]) == 699
    assert found[0][1] == 300 and found[1][1] == step_bounds.ROWS
