"""Makes llguidance enforce the grammars of answers, and xgrammar the grammars of tool calls.

llguidance reads a schema of 256 KiB in at most 0.5 s, rejects grammars beyond its limits, and releases the GIL.
xgrammar takes 13 s for one `maxLength`, so it only handles structural tags, which llguidance lacks, and only without
costly keywords (keywords.NOT_IN_TOOLS). If a grammar takes too much of the engine's time, its request ends.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xgrammar
from vllm.parser import abstract_parser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1 import structured_output
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, process_for_additional_properties
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar

from serve.core.keywords import NOT_IN_TOOLS, OPTIONS, nodes, without

ACCEPT_S, MASK_S, MOST_BEYOND_S = 0.02, 0.3, 0.5
"""Thread time in seconds to accept tokens and to fill a mask, and the total excess that a request may use beyond these.
Most grammars take 0.01 to 4 ms; a mask of a text of `maxLength` 500 takes 0.2 s on busy cores."""


def apply() -> None:
    """Patch vLLM before the engine forks its core. The engine's backend must be `guidance`."""
    # Remove with: vllm#55153, which lets llguidance support structural tags, and a time limit for grammars.
    structured_output.GuidanceBackend = FormBackend
    # Remove with: vllm#55153 too, which makes xgrammar unnecessary.
    abstract_parser._xgrammar_supports = _cheap(abstract_parser._xgrammar_supports)


@contextmanager
def prepared(params: SamplingParams) -> Iterator[None]:
    """Prepare the grammar for FormBackend; vLLM checks the parameters within this context. Within it a structural tag
    is hidden, since vLLM would check the tag with llguidance. Raises VLLMValidationError or ValueError for an
    unsupported grammar."""
    form = params.structured_outputs
    if form is None:
        yield
    elif form.structural_tag is None:
        form.json = _closed(form.json)
        yield
    else:
        form.structural_tag = json.dumps(_lean(json.loads(form.structural_tag)))
        validate_xgrammar_grammar(params)
        form._backend = "guidance"  # this backend name selects FormBackend
        params.structured_outputs = None
        try:
            yield
        finally:
            params.structured_outputs = form


def _closed(grammar: Any) -> Any:
    """Forbid properties that the schema does not list, unless the schema allows them or combines schemas, which would
    then forbid each other's properties."""
    schema = json.loads(grammar) if isinstance(grammar, str) else grammar
    if not isinstance(schema, dict):
        return grammar
    combined = any(
        "allOf" in node or ("properties" in node and node.keys() & {"$ref", "anyOf", "oneOf"})
        for _, node in nodes(schema)
    )
    return (schema if combined else process_for_additional_properties(schema)) | {"x-guidance": OPTIONS}


def _lean(tag: Any) -> Any:
    """Return a copy of a structural tag without costly keywords in its schemas."""
    if isinstance(tag, list):
        return [_lean(inner) for inner in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: without(NOT_IN_TOOLS, inner) if name == "json_schema" else _lean(inner) for name, inner in tag.items()
    }


class FormBackend(GuidanceBackend):
    """The grammar backend in the engine's core; vLLM uses one backend for all requests."""

    @functools.cached_property
    def _tags(self) -> XgrammarBackend:
        return XgrammarBackend(self.vllm_config, self.tokenizer, self.vocab_size)

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> Any:
        if request_type == StructuredOutputOptions.STRUCTURAL_TAG:
            grammar = self._tags.compile_grammar(request_type, grammar_spec, stop_token_ids)
            length = self.vocab_size
        else:  # a copy, because threads share the backend, which stores the grammar in itself
            grammar = GuidanceBackend.compile_grammar(copy.copy(self), request_type, grammar_spec, stop_token_ids)
            length = self.ll_tokenizer.vocab_size
        bounded = BoundedGrammar(grammar, length)
        mask = self.allocate_token_bitmask(1)
        bounded.fill_bitmask(mask, 0)
        matcher = getattr(grammar, "ll_matcher", None)
        if not mask.any() or (matcher is not None and matcher.is_error()):
            raise ValueError("the grammar allows no first token")
        return bounded

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Allocate a mask as long as the model's vocabulary, not page-locked: llguidance's page-locked mask would
        create a CUDA context of 0.5 GB in the core."""
        return xgrammar.allocate_token_bitmask(max_num_seqs, self.vocab_size)


class BoundedGrammar:
    """A grammar with a time limit: beyond it the grammar rejects every token, which ends the request. length:
    vocabulary size of the masks; a tokenizer's vocabulary may be longer than the model's."""

    def __init__(self, grammar: StructuredOutputGrammar, length: int) -> None:
        self._grammar, self._length, self._beyond_s = grammar, length, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        with self._timed(ACCEPT_S):
            accepted = self._grammar.accept_tokens(request_id, tokens)
        return accepted and self._beyond_s <= MOST_BEYOND_S

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        with self._timed(MASK_S):
            own = xgrammar.allocate_token_bitmask(1, self._length)
            self._grammar.fill_bitmask(own, 0)
            bitmask[batch_index] = own[0, : bitmask.shape[1]]

    @contextmanager
    def _timed(self, allowed_s: float) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self._beyond_s += max(0.0, time.thread_time() - began_s - allowed_s)


def _cheap(supports: Callable[[StructuredOutputsParams], bool]) -> Callable[[StructuredOutputsParams], bool]:
    """Also require that xgrammar handles an answer's grammar, as an alternative to calls of strict tools, at low cost;
    else vLLM gives only the answer's grammar to llguidance, and the model calls no tool."""

    @functools.wraps(supports)
    def run(form: StructuredOutputsParams) -> bool:
        schema = json.loads(form.json) if isinstance(form.json, str) else form.json
        return form.regex is None and without(NOT_IN_TOOLS, schema) == schema and supports(form)

    return run
