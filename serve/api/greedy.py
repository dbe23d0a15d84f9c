"""Answers greedy requests that vLLM refuses: several answers at temperature 0, and `top_p` 0.

OpenAI answers both. With `top_p` 0 only the likeliest token is left, so that is greedy too. Several greedy answers are
equal: one is computed, and each choice gets it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


def apply() -> None:
    """In the process that makes the engine, before it forks its core."""
    SamplingParams._verify_args = _top_p_zero(SamplingParams._verify_args)
    SamplingParams._verify_greedy_sampling = lambda self: None
    AsyncLLM.generate = equal_answers(AsyncLLM.generate)


def _top_p_zero(verify: Callable[[SamplingParams], None]) -> Callable[[SamplingParams], None]:
    @functools.wraps(verify)
    def run(self: SamplingParams) -> None:
        if self.top_p == 0:
            self.temperature, self.top_p = 0.0, 1.0
        verify(self)

    return run


def equal_answers(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        answers = sampling_params.n
        if answers == 1 or sampling_params.temperature != 0:
            return generate(self, prompt, sampling_params, *args, **kwargs)
        one = copy.copy(sampling_params)
        one.n = 1
        return _repeated(generate(self, prompt, one, *args, **kwargs), answers)

    return run


async def _repeated(results: AsyncGenerator[Any, None], answers: int) -> AsyncGenerator[Any, None]:
    try:
        async for result in results:
            result.outputs = [_numbered(output, index) for output in result.outputs for index in range(answers)]
            yield result
    finally:
        await results.aclose()


def _numbered(output: Any, index: int) -> Any:
    made = copy.copy(output)
    made.index = index
    return made
