"""Forms are checked and compiled by the backend that follows them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
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


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in (
        (backend_guidance, ("validate_guidance_grammar", "serialize_guidance_grammar")),
        (AsyncLLM, ("generate",)),
        (GuidanceBackend, ("compile_grammar", "allocate_token_bitmask")),
        (GuidanceGrammar, ("fill_bitmask",)),
        (grammars.abstract_parser, ("_xgrammar_supports", "resolve_tool_strictness")),
        (grammars.structural_tag_registry, ("resolve_tool_strictness",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    grammars.apply()


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
def test_backend_follows_every_kind_with_masks_of_the_models_length(known: int) -> None:
    of = backend(known)
    assert {"-", "0"} <= first_tokens(of, JSON, '{"type": "integer"}') <= {*"-0123456789"}
    assert first_tokens(of, StructuredOutputOptions.REGEX, "[ab]") == {"a", "b"}
    assert first_tokens(of, StructuredOutputOptions.CHOICE, '["yes", "no"]') == {"y", "n"}
    assert first_tokens(of, StructuredOutputOptions.JSON_OBJECT, "") == {"{"}
    assert first_tokens(of, TAG, tag({"type": "integer"})) == {"<"}


def test_masks_are_not_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not backend().allocate_token_bitmask(1).is_pinned()


@pytest.mark.parametrize("schema", [{"$ref": "#"}, CYCLE])
def test_compile_schema_without_any_value_raises(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no first token"):
        backend().compile_grammar(JSON, json.dumps(schema))


@pytest.mark.parametrize(
    ("more", "other"), [({}, False), ({"allOf": [{}, {}]}, True), ({"additionalProperties": {}}, True)]
)
def test_objects_have_the_properties_that_the_schema_names(more: dict[str, Any], other: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    grammar = backend().compile_grammar(JSON, json.dumps(schema))
    tokens = tokenizer().encode('{"b', add_special_tokens=False)
    assert (grammar.validate_tokens(tokens) == tokens) is other


def params(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form))


def test_tag_is_compiled_without_costly_keywords() -> None:
    asked = params(structural_tag=tag(NAMES))
    began_s = time.thread_time()
    backend_guidance.validate_guidance_grammar(asked)
    assert json.loads(asked.structured_outputs.structural_tag)["format"]["content"]["json_schema"] == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
    }
    backend().compile_grammar(TAG, asked.structured_outputs.structural_tag)
    assert time.thread_time() - began_s < 5


@pytest.mark.parametrize("form", [{"json": {"type": "x"}}, {"regex": "a(?=b)"}, {"json": {"enum": []}}])
def test_form_that_nothing_compiles_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError):
        backend_guidance.validate_guidance_grammar(params(**form))


@pytest.mark.parametrize(("choice", "enforced"), [("auto", False), ("required", True), ({"name": "f"}, True)])
def test_demanded_call_has_its_schema_enforced(choice: Any, enforced: bool) -> None:
    resolve = grammars._enforced(lambda tools, tool_choice, level: level)
    assert resolve([], choice, ToolStrictLevel.AUTO) is (
        ToolStrictLevel.PARAMETER if enforced else ToolStrictLevel.AUTO
    )


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
    assert grammars.abstract_parser._xgrammar_supports(StructuredOutputsParams(**form)) is fits


@pytest.mark.parametrize("tokens", [[], [1, 2]])
async def test_generate_refuses_a_form_that_failed(tokens: list[int]) -> None:
    async def generate(self: Any, prompt: Any, sampling_params: Any) -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="error")])

    with pytest.raises(VLLMValidationError):
        async for _ in grammars._refused(generate)(None, "", params(regex="a")):
            pass
