"""Compiles the form of an answer with llguidance, and calls of tools with xgrammar, in time bounded by measurement.

llguidance took 0.3 s at most for schemas and expressions of 64 KiB, and ends what needs more than its limits; it holds
Python's lock for none of it. xgrammar took 13 s for one `maxLength`, so it follows structural tags alone, which
llguidance does not know, and without the keywords that are costly (keywords.COSTLY).

vLLM checks a form on the loop that sends all tokens. Here it is checked in a thread, for CHECK_S at most.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import torch
import xgrammar
from torch.nn import functional
from vllm.exceptions import VLLMValidationError
from vllm.parser import abstract_parser
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar

from serve.forms.keywords import COSTLY, OPTIONS, closed, fault, without


def _give_way() -> None:
    """Lets an engine's steps and its loop go before this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


_checkers = ThreadPoolExecutor(4, thread_name_prefix="forms", initializer=_give_way)
CHECK_S = 10.0
"""Seconds that a form may take to be checked; most take milliseconds."""
IMPOSSIBLE = (
    "No answer fits the form that this request asks for (`response_format`, `structured_outputs`, `text.format`, "
    "`output_config` or the tools that it forces): it allows no value, or is too large to compile. A schema that "
    "refers to itself needs an object or a list in between."
)
UNFOLLOWED = (
    "An engine could not follow the form that this request asks for (`response_format`, `structured_outputs`, "
    "`text.format`, `output_config` or its tools) to the end of the answer: a token took too long to check, or none "
    "fitted. Ask for a simpler form: fewer alternatives, repeats and patterns."
)
TOO_LONG = f"The form that this request asks for takes more than {CHECK_S:.0f} s to check. Ask for a simpler form."


def apply() -> None:
    """In the process that makes the engine, before it forks its core. The engine's backend is `guidance`."""
    check = backend_guidance.validate_guidance_grammar
    backend_guidance.validate_guidance_grammar = lambda params, tokenizer=None: None  # `generate` has done it
    AsyncLLM.generate = _checked(AsyncLLM.generate, check)
    abstract_parser._xgrammar_supports = fits_beside_tools
    backend_guidance.serialize_guidance_grammar = _serialized(backend_guidance.serialize_guidance_grammar)
    GuidanceBackend.compile_grammar = _compiled(GuidanceBackend.compile_grammar)
    # llguidance would page-lock its masks, which opens a CUDA context of 0.5 GB in a core that has none.
    GuidanceBackend.allocate_token_bitmask = lambda self, masks: xgrammar.allocate_token_bitmask(masks, self.vocab_size)
    GuidanceGrammar.fill_bitmask = _filled(GuidanceGrammar.fill_bitmask)
    GuidanceGrammar.accept_tokens = _accepted(GuidanceGrammar.accept_tokens)


def _serialized(serialize: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(serialize)
    def run(kind: StructuredOutputOptions, spec: Any, *flags: bool) -> str:
        if kind not in (StructuredOutputOptions.JSON, StructuredOutputOptions.JSON_OBJECT):
            return serialize(kind, spec, *flags)
        schema = json.loads(spec) if kind == StructuredOutputOptions.JSON else {"type": "object"}
        form = json.dumps(closed(schema) if isinstance(schema, dict) else schema)
        return llguidance.LLMatcher.grammar_from_json_schema(form, defaults=OPTIONS)

    return run


def _compiled(compile_grammar: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_grammar)
    def run(self: Any, kind: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            _give_way()
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
    """Masks as long as the model's vocabulary, where the tokenizer has another one: the engine ends at others."""

    @functools.wraps(fill)
    def run(self: Any, bitmask: torch.Tensor, idx: int) -> None:
        own = xgrammar.allocate_token_bitmask(1, self.ll_tokenizer.vocab_size)
        length = bitmask.shape[1]
        if own.shape[1] == length:
            fill(self, bitmask, idx)
            return
        fill(self, own, 0)
        bitmask[idx] = functional.pad(own[0, :length], (0, max(0, length - own.shape[1])))

    return run


def _accepted(accept: Callable[..., bool]) -> Callable[..., bool]:
    """An answer whose grammar reached llguidance's limits is an error, where vLLM ends it as if it were whole."""

    @functools.wraps(accept)
    def run(self: Any, request_id: str, tokens: list[int]) -> bool:
        return accept(self, request_id, tokens) and not self.ll_matcher.is_error()

    return run


def _checked(generate: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, prompt, sampling_params, *args, **kwargs)
        if sampling_params.structured_outputs is None:
            return outputs
        return _or_refused(outputs, functools.partial(check_form, sampling_params, check))

    return run


def check_form(params: SamplingParams, check: Callable[..., None]) -> None:
    """Raises ValueError for a form that cannot be compiled. check: vLLM's, for llguidance."""
    form = params.structured_outputs
    if form.structural_tag is None:
        check(params)
        return
    form.structural_tag = json.dumps(_lean(json.loads(form.structural_tag)))
    validate_xgrammar_grammar(params)


def fits_beside_tools(form: Any) -> bool:
    """Whether xgrammar follows an answer's form whole, as an alternative to calls of strict tools; else vLLM gives the
    form alone to llguidance, and the model calls no tool."""
    schema = json.loads(form.json) if isinstance(form.json, str) else form.json
    return form.regex is None and (schema is None or fault(schema, of_tool=True) is None)


def _lean(tag: Any) -> Any:
    """A structural tag whose schemas have no costly keywords."""
    if isinstance(tag, list):
        return [_lean(inner) for inner in tag]
    if not isinstance(tag, dict):
        return tag
    return {name: without(COSTLY, inner) if name == "json_schema" else _lean(inner) for name, inner in tag.items()}


async def _or_refused(outputs: AsyncGenerator[Any, None], check: Callable[[], None]) -> AsyncGenerator[Any, None]:
    began = False
    try:
        try:
            checked = asyncio.get_running_loop().run_in_executor(_checkers, check)
            await asyncio.wait_for(checked, CHECK_S)
        except TimeoutError:
            raise VLLMValidationError(TOO_LONG) from None
        async for output in outputs:
            failed = [one for one in output.outputs if one.finish_reason == "error"]
            if failed:
                raise VLLMValidationError(UNFOLLOWED if began or any(one.token_ids for one in failed) else IMPOSSIBLE)
            began = True
            yield output
    finally:
        await outputs.aclose()
