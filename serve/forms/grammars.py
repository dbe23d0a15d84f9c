"""Has llguidance follow the forms of answers, and xgrammar the calls of tools.

llguidance took 0.5 s at most to read schemas of 256 KiB, and ends what needs more than its limits; it holds Python's
lock for none of it. xgrammar took 13 s for one `maxLength`, so it follows structural tags alone, which llguidance does
not know, and without the keywords that are costly (keywords.NOT_IN_TOOLS).
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import torch
import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.parser import abstract_parser
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import structural_tag_registry
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar

from serve.forms.keywords import NOT_IN_TOOLS, OPTIONS, nodes, without

UNFOLLOWED = (
    "No answer can follow the form that this request asks for (`response_format`, `structured_outputs`, "
    "`text.format`, `output_config` or its tools) to its end: it allows no value, refers to itself without an object "
    "or a list in between, or takes too long to check. Ask for a simpler form: fewer alternatives, repeats and "
    "patterns."
)


def apply() -> None:
    """In the process that makes the engine, before it forks its core. The engine's backend is `guidance`."""
    # Removed by: options of llguidance in vLLM's configuration.
    backend_guidance.serialize_guidance_grammar = _serialized(backend_guidance.serialize_guidance_grammar)
    # Removed by: vllm#55153, for vllm#55152.
    backend_guidance.validate_guidance_grammar = _validated(backend_guidance.validate_guidance_grammar)
    GuidanceBackend.compile_grammar = _compiled(GuidanceBackend.compile_grammar)
    # llguidance would page-lock its masks, which opens a CUDA context of 0.5 GB in a core that has none. Removed by: an
    # option for that in llguidance.torch.
    GuidanceBackend.allocate_token_bitmask = lambda self, masks: xgrammar.allocate_token_bitmask(masks, self.vocab_size)
    GuidanceGrammar.fill_bitmask = _filled(GuidanceGrammar.fill_bitmask)
    # Removed by: a level of `--tool-strict-level` (vllm#49661) for demanded calls alone.
    resolve = _enforced(structural_tag_registry.resolve_tool_strictness)
    structural_tag_registry.resolve_tool_strictness = abstract_parser.resolve_tool_strictness = resolve
    # Removed by: vllm#55153 too, which leaves nothing to xgrammar.
    abstract_parser._xgrammar_supports = _cheap(abstract_parser._xgrammar_supports)
    # Removed by: vLLM's own answer to a form that fails, for vllm#18783.
    AsyncLLM.generate = _refused(AsyncLLM.generate)


def _serialized(serialize: Callable[..., str]) -> Callable[..., str]:
    """Objects have only the properties that the schema names, unless it says otherwise or combines schemas, which would
    exclude each other's properties."""

    @functools.wraps(serialize)
    def run(kind: StructuredOutputOptions, spec: Any, *flags: bool) -> str:
        schema = json.loads(spec) if kind == StructuredOutputOptions.JSON and isinstance(spec, str) else spec
        if not isinstance(schema, dict):
            return serialize(kind, spec, True)
        combined = any(
            "allOf" in node or ("properties" in node and node.keys() & {"$ref", "anyOf", "oneOf"})
            for _, node in nodes(schema)
        )
        return serialize(kind, json.dumps(schema | {"x-guidance": OPTIONS}), True, not combined)

    return run


def _validated(validate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validate)
    def run(params: SamplingParams, tokenizer: Any = None) -> None:
        form = params.structured_outputs
        if form is None or form.structural_tag is None:
            validate(params, tokenizer)
            return
        form.structural_tag = json.dumps(_lean(json.loads(form.structural_tag)))
        validate_xgrammar_grammar(params)

    return run


def _lean(tag: Any) -> Any:
    """A structural tag whose schemas have no costly keywords."""
    if isinstance(tag, list):
        return [_lean(inner) for inner in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: without(NOT_IN_TOOLS, inner) if name == "json_schema" else _lean(inner) for name, inner in tag.items()
    }


def _compiled(compile_grammar: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_grammar)
    def run(self: Any, kind: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None = None) -> Any:
        if kind == StructuredOutputOptions.STRUCTURAL_TAG:
            if "shm_tags" not in self.__dict__:
                self.shm_tags = XgrammarBackend(self.vllm_config, self.tokenizer, self.vocab_size)
            grammar = self.shm_tags.compile_grammar(kind, spec, stop_token_ids)
        else:  # it keeps the form in an attribute, which another thread would overwrite
            grammar = compile_grammar(copy.copy(self), kind, spec, stop_token_ids)
        mask = self.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        matcher = getattr(grammar, "ll_matcher", None)
        if not mask.any() or (matcher is not None and matcher.is_error()):
            raise ValueError("the grammar allows no first token")
        return grammar

    return run


def _filled(fill: Callable[..., None]) -> Callable[..., None]:
    """Masks as long as the model's vocabulary, where the tokenizer has a longer one: the engine ends at others."""

    @functools.wraps(fill)
    def run(self: Any, bitmask: torch.Tensor, idx: int) -> None:
        own = xgrammar.allocate_token_bitmask(1, self.ll_tokenizer.vocab_size)
        fill(self, own, 0)
        bitmask[idx] = own[0, : bitmask.shape[1]]

    return run


def _enforced(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Calls that a client demands ("required", or a function by name) have arguments of their schema: vLLM enforces
    that for `strict` tools alone, and a small model that had to call `get_weather(city)` wrote schemas."""

    @functools.wraps(resolve)
    def run(tools: Any, tool_choice: Any, strict_level: ToolStrictLevel) -> Any:
        demanded = tool_choice not in ("auto", "none", None)
        return resolve(tools, tool_choice, ToolStrictLevel.PARAMETER if demanded else strict_level)

    return run


def _cheap(supports: Callable[..., bool]) -> Callable[..., bool]:
    """Whether xgrammar follows an answer's form, as an alternative to calls of strict tools; else vLLM gives the form
    alone to llguidance, and the model calls no tool."""

    @functools.wraps(supports)
    def run(form: Any) -> bool:
        schema = json.loads(form.json) if isinstance(form.json, str) else form.json
        return form.regex is None and without(NOT_IN_TOOLS, schema) == schema and supports(form)

    return run


def _refused(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A request that its grammar ended gets 400, where vLLM answers 500."""

    async def or_refused(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            async for output in outputs:
                if any(one.finish_reason == "error" for one in output.outputs):
                    raise VLLMValidationError(UNFOLLOWED)
                yield output

    @functools.wraps(generate)
    def run(self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, prompt, sampling_params, *args, **kwargs)
        return outputs if sampling_params.structured_outputs is None else or_refused(outputs)

    return run
