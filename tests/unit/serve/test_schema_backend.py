"""Each form goes to a backend that follows all of it, and expressions to llguidance, which takes milliseconds for what
took xgrammar seconds for each token."""

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

from serve.forms import schema_backend

NAMED = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
BESIDE = {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 0}]}
PLAIN = {"type": "object", "properties": {"pattern": {"type": "string"}}}
KEYS = {"type": "object", "patternProperties": {"a": {"type": "string"}}, "additionalProperties": False}
NAMES = {"type": "object", "propertyNames": {"pattern": "^a$"}}
UNFOLLOWED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}


def backends() -> tuple[Any, Any, list[Any]]:
    seen: list[Any] = []
    xgrammars = SimpleNamespace(**{schema_backend.CHECK: seen.append})
    llguidances = SimpleNamespace(**{schema_backend.DECLINES: lambda schema: True})
    schema_backend.apply(xgrammars, llguidances)
    return xgrammars, llguidances, seen


def goes_to_xgrammar(**asked: Any) -> bool:
    params = SimpleNamespace(structured_outputs=StructuredOutputsParams(**asked))
    try:
        getattr(backends()[0], schema_backend.CHECK)(params)
    except VLLMValidationError:
        return False
    return True


@pytest.mark.parametrize(
    "asked",
    [{"regex": "a+"}, {"json": NAMED}, {"json": json.dumps(NAMED)}, {"json": {"items": [NAMED]}}, {"json": BESIDE}]
    + [{"json": KEYS}, {"json": {"type": "string", "maxLength": 500}}, {"json": {"items": {"minLength": 9}}}],
)
def test_form_that_xgrammar_passes_over_goes_to_llguidance(asked: dict[str, Any]) -> None:
    assert not goes_to_xgrammar(**asked)


@pytest.mark.parametrize(
    "asked", [{"json": PLAIN}, {"json": NAMES}, {"json": "{"}, {"choice": ["a"]}, {"json_object": True}]
)
def test_form_that_xgrammar_follows_goes_to_it(asked: dict[str, Any]) -> None:
    assert goes_to_xgrammar(**asked)


def test_tools_schema_that_no_backend_follows_stays_with_xgrammar_unchecked() -> None:
    xgrammars, llguidances, seen = backends()
    form = StructuredOutputsParams(json=UNFOLLOWED)
    getattr(xgrammars, schema_backend.CHECK)(SimpleNamespace(structured_outputs=form))
    assert not seen, "vLLM's check declines it, and llguidance then refuses it"
    assert getattr(llguidances, schema_backend.DECLINES)(UNFOLLOWED) is False


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
