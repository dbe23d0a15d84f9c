"""Requests of one owner wait in an engine behind each other, not all of them before everybody else's.

vLLM takes waiting requests in the order in which they came, so that an owner who sends a hundred long prompts at once
had an engine for himself until they were computed. With `--scheduling-policy priority` it takes the smallest number
first. Here each request gets the number that start-time fair queueing gives it (Goyal, Vin and Cheng, SIGCOMM 1996):
where its owner's earlier requests end if each took as long as it has tokens, but not before what is being served now.
Who asks little is next, whoever has asked much before; who is alone has the whole engine; rollouts of a job that trains
wait behind everybody. Where KV memory ends, vLLM
preempts the largest number first.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from serve.api import answer_version
from serve.api.turns import Turns, behind, mark_of, number


def apply() -> None:
    """Call once per process, before it makes its engine."""
    AsyncLLM.generate = _in_turn(AsyncLLM.generate)
    AsyncLLM.encode = _in_turn(AsyncLLM.encode)


def _in_turn(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def run(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        if self.vllm_config.scheduler_config.policy != "priority":  # a deployment's own arguments may say so
            return answer(self, *args, **kwargs)
        given = dict(zip(("prompt", "params"), args, strict=False)) | kwargs
        params = given.get("params") or given.get("sampling_params") or given.get("pooling_params")
        turns = self.__dict__.setdefault("shm_turns", Turns())
        outputs = functools.partial(answer, self, *args, **kwargs)
        return _placed(outputs, turns, answer_version.owner(), _tokens(given.get("prompt")), params)

    return run


async def _placed(
    answer: Callable[..., AsyncGenerator[Any, None]], turns: Turns, owner: str, tokens: int, params: Any
) -> AsyncGenerator[Any, None]:
    place = turns.enter(owner, tokens)
    cumulative = getattr(params, "output_kind", None) is RequestOutputKind.CUMULATIVE
    served, written = False, 0
    outputs = answer(priority=number(behind(owner, place), mark_of(owner)))
    try:
        async for output in outputs:
            if not served:
                served = True
                turns.served(place)
            new = sum(len(one.token_ids) for one in output.outputs) if isinstance(output.outputs, list) else 0
            written = new if cumulative else written + new
            yield output
    finally:
        await outputs.aclose()
        turns.left(owner, written if served else -tokens)


def _tokens(prompt: Any) -> int:
    found = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return max(1, len(found)) if found is not None else 1
