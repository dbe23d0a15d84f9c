"""Forms are compiled by the backend that follows them, off the loop, within their time, and refused with words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from serve.forms import grammars
from tests.train_support.tiny import tokenizer

NAMES = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 500, "pattern": r"^(\w{1,20} ?){1,50}$"}},
}
CYCLE = {"$ref": "#/$defs/p", "$defs": {"p": {"$ref": "#/$defs/q"}, "q": {"anyOf": [{"$ref": "#/$defs/p"}]}}}
JSON, TAG = StructuredOutputOptions.JSON, StructuredOutputOptions.STRUCTURAL_TAG


def tag(schema: dict[str, Any]) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<c>", "content": content, "end": "</c>"}}
    )


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's check, with the patches applied until the test ends."""
    plain = backend_guidance.validate_guidance_grammar
    for owner, names in (
        (backend_guidance, ("validate_guidance_grammar", "serialize_guidance_grammar")),
        (AsyncLLM, ("generate",)),
        (GuidanceBackend, ("compile_grammar", "allocate_token_bitmask")),
        (GuidanceGrammar, ("fill_bitmask", "accept_tokens")),
        (grammars.abstract_parser, ("_xgrammar_supports",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    grammars.apply()
    return plain


def backend(known: int = 352) -> Any:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    options = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    config = SimpleNamespace(structured_outputs_config=options, model_config=None, speculative_config=None)
    return GuidanceBackend(config, words, known)


def first_tokens(of: Any, kind: StructuredOutputOptions, spec: str) -> set[str]:
    mask = of.allocate_token_bitmask(2)
    of.compile_grammar(kind, spec).fill_bitmask(mask, 1)
    assert mask.shape == (2, -(-of.vocab_size // 32)) and set(mask[0].tolist()) == {-1}
    return {of.tokenizer.decode([n]) for n in range(of.vocab_size) if mask[1, n // 32] >> (n % 32) & 1}


@pytest.mark.parametrize("known", [320, 325, 352, 384])
def test_backend_follows_every_kind_with_masks_of_the_models_length(check: Any, known: int) -> None:
    of = backend(known)
    assert {"-", "0"} <= first_tokens(of, JSON, '{"type": "integer"}') <= {*"-0123456789"}
    assert first_tokens(of, StructuredOutputOptions.REGEX, "[ab]") == {"a", "b"}
    assert first_tokens(of, StructuredOutputOptions.CHOICE, '["yes", "no"]') == {"y", "n"}
    assert first_tokens(of, StructuredOutputOptions.JSON_OBJECT, "") == {"{"}
    assert first_tokens(of, TAG, tag({"type": "integer"})) == {"<"}


def test_masks_are_not_page_locked(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not backend().allocate_token_bitmask(1).is_pinned()


@pytest.mark.parametrize("schema", [{"$ref": "#"}, CYCLE])
def test_compile_schema_without_any_value_raises(check: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no first token"):
        backend().compile_grammar(JSON, json.dumps(schema))


def test_answer_whose_grammar_reached_its_limits_is_refused(check: Any) -> None:
    of = backend()
    grammar = of.compile_grammar(StructuredOutputOptions.REGEX, "(a?){1000}a{1000}")
    mask, (letter,) = of.allocate_token_bitmask(1), of.tokenizer.encode("a", add_special_tokens=False)
    accepted = []
    for _ in range(8):
        accepted.append(grammar.accept_tokens("r", [letter]))
        grammar.fill_bitmask(mask, 0)
    assert not accepted[-1]


def params(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form))


def test_check_of_a_tag_leaves_out_costly_keywords(check: Any) -> None:
    asked = params(structural_tag=tag(NAMES))
    began_s = time.thread_time()
    grammars.check_form(asked, check)
    assert json.loads(asked.structured_outputs.structural_tag)["format"]["content"]["json_schema"] == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
    }
    backend().compile_grammar(TAG, asked.structured_outputs.structural_tag)
    assert time.thread_time() - began_s < 5


@pytest.mark.parametrize("form", [{"json": {"type": "x"}}, {"regex": "a(?=b)"}, {"json": {"enum": []}}])
def test_check_of_a_form_that_nothing_compiles_raises(check: Any, form: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError):
        grammars.check_form(params(**form), check)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"json": NAMES}, False),
        ({"json": json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})}, True),
        ({"regex": "a"}, False),
        ({"choice": ["a"]}, True),
        ({"json_object": True}, True),
    ],
)
def test_form_beside_strict_tools_goes_to_xgrammar_only_if_enforced(form: dict[str, Any], fits: bool) -> None:
    assert grammars.fits_beside_tools(StructuredOutputsParams(**form)) is fits


def output(tokens: list[int], reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])


async def outputs_of(outputs: list[Any], check: Any) -> list[Any]:
    async def generate(self: Any, prompt: Any, sampling_params: Any) -> AsyncGenerator[Any, None]:
        for one in outputs:
            yield one

    return [one async for one in grammars._checked(generate, check)(None, "", params(regex="a"))]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([output([], "error")], grammars.IMPOSSIBLE),
        ([output([1, 2], "error")], grammars.UNFOLLOWED),
        ([output([1], None), output([], "error")], grammars.UNFOLLOWED),
    ],
)
async def test_generate_refuses_a_form_that_failed(outputs: list[Any], words: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        await outputs_of(outputs, lambda asked: None)
    assert str(caught.value).startswith(words)


async def test_generate_checks_a_form_off_the_loop_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CHECK_S", 0.05)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(count())
    with pytest.raises(VLLMValidationError) as caught:
        await outputs_of([output([1], None)], lambda asked: time.sleep(0.2))
    beside.cancel()
    assert str(caught.value).startswith(grammars.TOO_LONG) and turns > 10
    assert await outputs_of([output([1], "stop")], lambda asked: None)
