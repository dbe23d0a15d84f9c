"""What a grammar takes of an engine's steps is bounded, whatever is asked of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import xgrammar

from serve.vllm import grammar_bounds

# One token for each character, and one of 50 spaces.
_VOCABULARY = [chr(code) for code in range(32, 127)] + [" " * 50, "\n", "</s>"]
_SPACES = len(_VOCABULARY) - 3


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> xgrammar.GrammarCompiler:
    """Of a class with the bound; the library's own stays as it is."""
    bounded = type("Bounded", (xgrammar.GrammarCompiler,), {})
    grammar_bounds.bound_whitespace(bounded)
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
    assert not accepts(compiled, '{"a":1,' + " " * (2 * grammar_bounds.WHITESPACE + 1))


def test_also_in_the_arguments_of_a_call(compiler: xgrammar.GrammarCompiler) -> None:
    content = {"type": "json_schema", "json_schema": ODD_KEYS[0], "max_whitespace_cnt": None}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    assert accepts(compiled, '<f>{"a":1, "a":2}</f>')
    assert not accepts(compiled, '<f>{"a":1,' + " " * (2 * grammar_bounds.WHITESPACE + 1))


def test_a_schema_within_a_tag_stays_as_it_is() -> None:
    schema = {"type": "json_schema", "properties": {"type": {"const": "json_schema"}}}
    inner = {"type": "json_schema", "json_schema": schema}
    bounded = grammar_bounds.with_bounds({"format": {"content": [inner, {"type": "any_text"}]}})
    assert bounded["format"]["content"] == [
        {**inner, "max_whitespace_cnt": grammar_bounds.WHITESPACE},
        {"type": "any_text"},
    ]


class Slow:
    """A grammar whose steps take the times of `clock`."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        self.clock[0] += bitmask

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.clock[0] += tokens[0] / 1000
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_a_grammar_that_takes_too_long_ends_its_own_request(clock: list[float]) -> None:
    bounded = type("Bounded", (Slow,), {})
    grammar_bounds.bound_time(bounded)
    quick, slow, masks = bounded(clock), bounded(clock), bounded(clock)
    for _ in range(10_000):
        quick.fill_bitmask(0.015, 0)
        assert quick.accept_tokens("r", [15])
    steps = 0
    while slow.accept_tokens("r", [60]):
        steps += 1
    assert steps == pytest.approx(grammar_bounds.MOST_BEYOND_S / 0.04, abs=1)
    masks.fill_bitmask(1.0, 0)
    assert not masks.accept_tokens("r", [0])
