"""Greedy requests that vLLM refuses are answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from serve.api import greedy


class Engine:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def _answers(self) -> AsyncGenerator[RequestOutput, None]:
        for text in ("a", "b"):
            output = CompletionOutput(0, text, [1], None, None)
            yield RequestOutput("r", None, [1], None, [output], finished=False)

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> Any:
        self.asked.append(sampling_params.n)
        return self._answers()


async def answered(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[list[tuple[int, str]]]]:
    monkeypatch.setattr(SamplingParams, "_verify_greedy_sampling", lambda self: None)
    params = SamplingParams(n=3, temperature=temperature)
    engine = Engine()
    results = greedy.equal_answers(Engine.generate)(engine, "p", params, "r")
    return engine.asked, [[(one.index, one.text) for one in result.outputs] async for result in results]


async def test_greedy_answers_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = await answered(0.0, monkeypatch)
    assert asked == [1]
    assert seen == [[(0, "a"), (1, "a"), (2, "a")], [(0, "b"), (1, "b"), (2, "b")]]


async def test_sampled_answers_are_computed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = await answered(1.0, monkeypatch)
    assert asked == [3] and seen == [[(0, "a")], [(0, "b")]]


def test_top_p_zero_is_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingParams, "_verify_args", greedy._top_p_zero(SamplingParams._verify_args))
    params = SamplingParams(top_p=0.0, temperature=0.8)
    assert (params.temperature, params.top_p) == (0.0, 1.0)
