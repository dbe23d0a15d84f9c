"""Requests for embeddings: some inputs at a time, and answers that leave other threads their turns."""

from __future__ import annotations

import asyncio
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.responses import ORJSONResponse
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing, PoolingServing

from serve.api import embedding_requests
from serve.api.embedding_requests import AT_ONCE, SLICES


class Served:
    """As vLLM's PoolingServing: asks for all inputs that its context has, at once."""

    asked: int = 0
    most: int = 0
    names: list[str]

    async def _preprocessing(self, io_processor: Any, context: Any) -> None:
        raise NotImplementedError

    def _postprocessing(self, io_processor: Any, context: Any) -> str:
        raise NotImplementedError

    _postprocessing_async = _preprocessing

    async def _prepare_generators(self, context: Any) -> None:
        self.names += context.prompt_request_ids

    async def _collect_batch(self, context: Any) -> None:
        async def answer(one: Any) -> Any:
            self.asked += 1
            self.most = max(self.most, self.asked)
            await asyncio.sleep(0)
            self.asked -= 1
            return f"vector of {one}"

        context.final_res_batch = await asyncio.gather(*map(answer, context.engine_inputs))


class Processor:
    """As its processor of inputs."""

    at_once = most = 0

    def get_request_factory_online(self, context: Any) -> list[int]:
        return context.given

    async def render_async(self, one: int) -> int:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return one


@pytest.mark.parametrize("number", [1, AT_ONCE, AT_ONCE + 1])
async def test_answers_of_many_vectors_are_not_written_on_the_thread_that_makes_tokens(number: int) -> None:
    """Whoever asked meanwhile waited for all answers of eight requests of 2,048 that were ready: 1.8 s, now 0.04."""

    class Writes(Served):
        def __init__(self) -> None:
            self._postprocessing_async = self._on_the_renderers

        def _postprocessing(self, io_processor: Any, context: Any) -> str:
            return threading.current_thread().name

        async def _on_the_renderers(self, io_processor: Any, context: Any) -> str:
            return "the renderer's"

    embedding_requests.some_at_a_time(Writes)
    context = SimpleNamespace(engine_inputs=list(range(number)))
    wrote = await Writes()._postprocessing_async(Processor(), context)
    assert wrote.startswith("long embeddings") if number > AT_ONCE else wrote == "the renderer's"


def test_vllm_writes_answers_where_we_think() -> None:
    """What is taken over is the instance's, made in its constructor."""
    made = inspect.getsource(PoolingBaseServing.__init__)
    assert "self._postprocessing_async = make_async(" in made and "executor=self._executor" in made
    assert issubclass(PoolingServing, PoolingBaseServing)
    assert "self._postprocessing_async(io_processor, ctx)" in inspect.getsource(PoolingServing.__call__)


@pytest.mark.parametrize("number", [1, AT_ONCE, 2048])
async def test_of_a_request_some_inputs_are_asked_at_a_time(number: int) -> None:
    """Eight of 2,048 had a neighbour's single one wait for four seconds."""
    served: Any = type("Sliced", (Served,), {"names": []})
    embedding_requests.some_at_a_time(served)
    one, processor = served(), Processor()
    context = SimpleNamespace(given=list(range(number)), request_id="embd-1", prompt_request_ids=None)
    await one._preprocessing(processor, context)
    await one._prepare_generators(context)
    await one._collect_batch(context)
    assert context.final_res_batch == [f"vector of {place}" for place in range(number)]
    assert context.engine_inputs == context.given and one.names == [f"embd-1-{place}" for place in range(number)]
    assert processor.most == min(number, AT_ONCE) and one.most == min(number, SLICES * AT_ONCE)


async def test_one_input_that_fails_ends_its_request_with_its_own_error() -> None:
    served: Any = type("Sliced", (Served,), {"names": []})

    async def fails(self: Any, context: Any) -> None:
        if 100 in context.engine_inputs:
            raise ValueError("too long")
        await asyncio.Event().wait()

    served._collect_batch = fails
    embedding_requests.some_at_a_time(served)
    context = SimpleNamespace(engine_inputs=list(range(300)), request_id="embd-1", prompt_request_ids=None)
    with pytest.raises(ValueError, match="too long"):
        await served()._collect_batch(context)


async def test_a_request_without_inputs_is_refused_as_before() -> None:
    served: Any = type("Sliced", (Served,), {"names": []})
    embedding_requests.some_at_a_time(served)
    with pytest.raises(ValueError, match="at least one prompt"):
        await served()._preprocessing(Processor(), SimpleNamespace(given=[]))


def test_an_answer_is_written_one_vector_after_the_other_and_is_the_same() -> None:
    written = embedding_requests.one_by_one(ORJSONResponse)
    rows = [{"index": place, "embedding": np.arange(5, dtype=np.float32) / 3} for place in range(3)]
    for content in ({"object": "list", "data": rows, "usage": {"prompt_tokens": 3}}, {"data": []}, {"error": "x"}, [1]):
        assert written(content=content).body == ORJSONResponse(content=content).body
