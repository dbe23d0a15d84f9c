"""Regular expressions go to llguidance, which follows in milliseconds what took xgrammar seconds for each token."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import llguidance
import llguidance.torch
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from serve.api import expression_backend

NAMED = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
PLAIN = {"type": "object", "properties": {"pattern": {"type": "string"}}}
KEYS = {"type": "object", "patternProperties": {"a": {"type": "string", "pattern": "b"}}}
NAMES = {"anyOf": [NAMED, {"type": "object", "propertyNames": {"pattern": "^a$"}}]}


def taken_by_xgrammar(**asked: Any) -> bool:
    seen = []
    backend = SimpleNamespace(**{expression_backend.CHECK: seen.append})
    expression_backend.apply(backend)
    params = SimpleNamespace(structured_outputs=StructuredOutputsParams(**asked))
    try:
        getattr(backend, expression_backend.CHECK)(params)
    except VLLMValidationError:
        return False
    return seen == [params]


@pytest.mark.parametrize(
    "asked", [{"regex": "a+"}, {"json": NAMED}, {"json": json.dumps(NAMED)}, {"json": {"items": [NAMED]}}]
)
def test_expressions_are_not_given_to_xgrammar(asked: dict[str, Any]) -> None:
    assert not taken_by_xgrammar(**asked)


@pytest.mark.parametrize(
    "asked", [{"json": PLAIN}, {"json": KEYS}, {"json": NAMES}, {"json": "{"}, {"choice": ["a"]}, {"json_object": True}]
)
def test_what_has_none_or_what_llguidance_cannot_do_is(asked: dict[str, Any]) -> None:
    assert taken_by_xgrammar(**asked)


@pytest.mark.parametrize("pattern", ["(.{1,8}){32}", "(.{0,2}){128}", "(.{1,8})*", ".{0,16}" * 12, "(.?.?){100}"])
def test_llguidance_follows_in_little_time_what_has_many_ways(pattern: str) -> None:
    # All pairs of printable characters: most tokens fit.
    pairs = [chr(a) + chr(b) for a in range(32, 127) for b in range(97, 123)]
    words = [*(chr(code) for code in range(256)), *pairs, "</s>"]
    tokens = [word.encode("latin-1") for word in words]
    one = SimpleNamespace(
        eos_token_id=len(tokens) - 1, bos_token_id=None, tokens=tokens, special_token_ids=[len(tokens) - 1]
    )
    wrapper = llguidance.TokenizerWrapper(type("Of", (), {**vars(one), "__call__": lambda self, text: list(text)})())
    known = llguidance.LLTokenizer(wrapper)
    matcher = llguidance.LLMatcher(known, llguidance.grammar_from("regex", pattern))
    mask = llguidance.torch.allocate_token_bitmask(1, known.vocab_size)
    began_s = time.thread_time()
    for _ in range(16):
        llguidance.torch.fill_next_token_bitmask(matcher, mask, 0)
        assert mask.any() and matcher.consume_token(256 + 26 * 65)
    assert time.thread_time() - began_s < 1.0
