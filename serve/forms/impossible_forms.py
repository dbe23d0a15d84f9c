"""Refuses with 400 a form that no answer fits, or that costs too much to follow.

A schema may allow no value at all, as `{"$ref": "#"}` does. xgrammar compiles that: the sampler then picks a token that
the grammar refuses, and vLLM ends the request with "Internal server error", as it does if the grammar cannot be
compiled. llguidance notes an error and ends the answer before its first token, as if nothing were wrong. So the first
tokens that a grammar allows are checked in the thread that compiles it, and the client is told.

Other grammars refuse a token later: those that took an engine too long (serve.vllm.request_bounds), and those
whose mask allows tokens that they do not accept. vLLM ends their requests with the same words; here that counts as the
form's fault, too.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

IMPOSSIBLE = (
    "No answer fits the form that this request asks for (`response_format`, `structured_outputs`, `text.format`, "
    "`output_config` or the tools that it forces): it allows no value, or uses something that no grammar backend of "
    "this server compiles. A schema that refers to itself needs an object or a list in between."
)
UNFOLLOWED = (
    "An engine could not follow the form that this request asks for (`response_format`, `structured_outputs`, "
    "`text.format`, `output_config` or its tools) to the end of the answer: each token took too long to check, or "
    "none fitted. Ask for a simpler form: fewer alternatives, repeats and patterns."
)


def apply() -> None:
    """In the process that makes the engine, before it forks its core."""
    for backend in (XgrammarBackend, GuidanceBackend):
        backend.compile_grammar = _with_a_first_token(backend.compile_grammar)
    AsyncLLM.generate = _told(AsyncLLM.generate)


def _with_a_first_token(compile_grammar: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_grammar)
    def run(backend: Any, *args: Any, **kwargs: Any) -> Any:
        grammar = compile_grammar(backend, *args, **kwargs)
        mask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        noted = getattr(grammar, "ll_matcher", None)
        if not mask.any() or (noted is not None and noted.get_error()):
            raise ValueError("the grammar allows no first token")
        return grammar

    return run


def _told(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, prompt, sampling_params, *args, **kwargs)
        return outputs if sampling_params.structured_outputs is None else _or_refused(outputs)

    return run


async def _or_refused(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    began = False
    try:
        async for output in outputs:
            failed = [one for one in output.outputs if one.finish_reason == "error"]
            if failed:
                raise VLLMValidationError(UNFOLLOWED if began or any(one.token_ids for one in failed) else IMPOSSIBLE)
            began = True
            yield output
    finally:
        await outputs.aclose()
