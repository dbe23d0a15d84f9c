"""Requests for embeddings: each is read as one kind and not as all five, computed some inputs at a time, and written
one by one.

vLLM tries a body as text, then as four forms of conversation, and writes an error for each token that is not a message:
0.9 s and 350 MB for 65,536 tokens, on the loop that answers everybody, where reading them as tokens takes 1 ms.

It makes a task for each input, all at once: behind eight requests of 2,048 short inputs a neighbour's single one waited
four seconds, behind thirty ten. And it writes all vectors of an answer in one call, which no other thread interrupts: a
second for 2,048 vectors of 4,096 numbers. It does so on the thread that tokenizes everybody's prompts, which therefore
waited for all large answers that were ready. Here these answers have a thread of their own.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Discriminator, Tag
from vllm.entrypoints.pooling.base.serving import PoolingServing
from vllm.entrypoints.pooling.embed import protocol, serving

AT_ONCE = 64
"""How many inputs of a request are tokenized, or sent to the engine, together."""
SLICES = 2
"""How many times AT_ONCE inputs of a request are at work: while one part is computed the next is prepared."""
_LONG_ANSWERS = ThreadPoolExecutor(1, "long embeddings")
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def apply() -> None:
    """Before vLLM makes its routes. Written for 0.32's `EmbeddingRequest`, an annotated union of five models."""
    conversations = (
        protocol.EmbeddingChatRequest
        | protocol.EmbeddingBatchChatRequest
        | protocol.EmbeddingChatInputRequest
        | protocol.EmbeddingBatchChatInputRequest
    )
    protocol.EmbeddingRequest = Annotated[
        Annotated[protocol.EmbeddingCompletionRequest, Tag("text")] | Annotated[conversations, Tag("conversation")],
        Discriminator(_kind),
        BeforeValidator(protocol.reject_removed_pooling_parameters),
    ]
    some_at_a_time(PoolingServing)
    written = one_by_one(serving.get_json_response_cls())
    serving.get_json_response_cls = lambda: written


def _kind(body: Any) -> str:
    if not isinstance(body, dict) or "messages" in body:
        return "conversation"
    first = body.get("input")
    while isinstance(first, list) and first:
        first = first[0]
    return "conversation" if isinstance(first, dict) else "text"


def some_at_a_time(served: Any) -> None:
    """served: vLLM's PoolingServing, whose `_preprocessing` makes an engine's requests of all inputs, whose
    `_prepare_generators` and `_collect_batch` ask for them, and whose `_postprocessing_async` writes the answer."""
    prepare, collect, init = served._prepare_generators, served._collect_batch, served.__init__

    @functools.wraps(init)
    def begun(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self._postprocessing_async = _long_ones_apart(self._postprocessing, self._postprocessing_async)

    served.__init__ = begun
    served._preprocessing = _rendered
    served._prepare_generators = _nothing
    served._collect_batch = _in_slices(prepare, collect)


async def _rendered(self: Any, io_processor: Any, context: Any) -> None:
    requests = io_processor.get_request_factory_online(context)
    if not requests:
        raise ValueError("You must pass at least one prompt")
    made: list[Any] = []
    for at in range(0, len(requests), AT_ONCE):
        some = requests[at : at + AT_ONCE]
        made += await asyncio.gather(*(io_processor.render_async(one) for one in some))
    context.engine_inputs = made


def _long_ones_apart(write: Callable[..., Any], written: Callable[..., Any]) -> Callable[..., Any]:
    async def run(io_processor: Any, context: Any) -> Any:
        if len(context.engine_inputs) <= AT_ONCE:
            return await written(io_processor, context)
        return await asyncio.get_running_loop().run_in_executor(_LONG_ANSWERS, write, io_processor, context)

    return run


async def _nothing(self: Any, context: Any) -> None:
    """`_collect_batch` asks for one slice after the other."""


def _in_slices(prepare: Callable[..., Any], collect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collect)
    async def run(self: Any, context: Any) -> None:
        inputs, at_work = context.engine_inputs, asyncio.Semaphore(SLICES)
        names = context.prompt_request_ids or [f"{context.request_id}-{number}" for number in range(len(inputs))]

        async def computed(at: int) -> list[Any]:
            some = copy.copy(context)
            some.engine_inputs, some.prompt_request_ids = inputs[at : at + AT_ONCE], names[at : at + AT_ONCE]
            async with at_work:
                await prepare(self, some)
                await collect(self, some)
            return list(some.final_res_batch)

        parts = await asyncio.gather(*(computed(at) for at in range(0, len(inputs), AT_ONCE)))
        context.final_res_batch = [one for part in parts for one in part]

    return run


def one_by_one(response: Any) -> Any:
    """response: FastAPI's ORJSONResponse. One that writes the same, with turns for other threads in between."""
    whole = response.render

    def render(self: Any, content: Any) -> bytes:
        if not (isinstance(content, dict) and isinstance(content.get("data"), list)):
            return whole(self, content)
        rows = b",".join([orjson.dumps(row, option=_OPTIONS) for row in content["data"]])
        return orjson.dumps({**content, "data": orjson.Fragment(b"[" + rows + b"]")}, option=_OPTIONS)

    # vLLM knows by the name that it may hold arrays.
    return type(response.__name__, (response,), {"render": render})
