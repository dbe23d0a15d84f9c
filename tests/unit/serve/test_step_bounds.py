"""What one request takes of an engine's steps is bounded, whatever it asks for."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.output_processor import RequestOutputCollector

from serve.api.answer_version import Answer
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


def unread_bounded() -> Any:
    """vLLM's collector of a request's outputs, with the bound."""
    bounded = type("Bounded", (RequestOutputCollector,), {})
    step_bounds.bound_unread(bounded)
    return bounded


def put(waiting: Any, count: int, each: int = 21, choices: int = 1) -> Any:
    """This many tokens with so many log-probabilities each come, and nobody reads."""
    logprobs = {number: Logprob(-1.0) for number in range(each)}
    for number in range(count):
        one = CompletionOutput(number % choices, "a", [1], 0.0, [logprobs] if each else None)
        waiting.put(RequestOutput("r", None, [1], None, [one], False))
    return waiting


@pytest.mark.parametrize("choices", [1, 64])
def test_log_probabilities_of_a_stream_that_is_not_read_end_its_request(choices: int) -> None:
    """A client that read nothing for a minute had all of them kept, and written in one go once it read."""
    within, made = step_bounds.UNREAD // 21, unread_bounded()
    kept = put(made(RequestOutputKind.DELTA, "r"), within, choices=choices).get_nowait()
    assert sum(len(one.token_ids) for one in kept.outputs) == within
    waiting = put(made(RequestOutputKind.DELTA, "r"), 2 * within, choices=choices)
    with pytest.raises(InputStreamError, match="to be read") as caught:
        waiting.get_nowait()
    assert caught.value.cause.parameter == "logprobs"


def test_so_do_those_of_all_streams_of_an_owner_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made, owner = unread_bounded(), Answer(owner="ann")
    monkeypatch.setattr(step_bounds.answer_version, "current", lambda: owner)
    share = step_bounds.UNREAD // 21
    streams = [put(made(RequestOutputKind.DELTA, "r"), share) for _ in range(4)]
    owner = Answer(owner="ben")
    put(made(RequestOutputKind.DELTA, "r"), share).get_nowait()
    owner = Answer(owner="ann")
    with pytest.raises(InputStreamError, match="of all that you ask for"):
        put(made(RequestOutputKind.DELTA, "r"), share // 2).get_nowait()
    streams[0].get_nowait()
    streams[1].close()
    put(made(RequestOutputKind.DELTA, "r"), share).get_nowait()


def test_texts_of_a_stream_that_is_not_read_wait_and_plain_answers_are_no_stream() -> None:
    made = unread_bounded()
    kept = put(made(RequestOutputKind.DELTA, "r"), step_bounds.UNREAD + 1, each=0).get_nowait()
    assert len(kept.outputs[0].token_ids) > step_bounds.UNREAD
    put(made(RequestOutputKind.CUMULATIVE, "r"), 9000).get_nowait()
