"""A refusal says what was computed before it, so that it is paid for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve.api import answer_version


class Outputs:
    """Stands for vLLM's OutputProcessor."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, choice: int) -> None:
        self.request_states[request.request_id] = SimpleNamespace(
            is_prefilling=True, prompt_len=10, request_index=choice, shm_answer=None
        )

    def process_outputs(self, outputs: list[Any]) -> None:
        for one in outputs:
            self.request_states[one.request_id].is_prefilling = False


ADD: Callable[..., None] = answer_version._for_this_answer(Outputs.add_request)
STEP: Callable[..., None] = answer_version._counted(Outputs.process_outputs)


@pytest.mark.parametrize(
    ("status", "choices", "steps", "told"),
    [
        (400, [0], [3, 1], b"10 4"),
        (400, [0, 1], [2], b"10 4"),
        (400, [0, 0], [1], b"20 2"),
        (400, [0], [0], None),
        (400, [], [], None),
        (200, [0], [3, 1], None),
    ],
    ids=["steps", "choices", "prompts", "never begun", "never asked", "answered"],
)
async def test_a_refusal_says_what_was_computed_before_it(
    status: int, choices: list[int], steps: list[int], told: bytes | None
) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outputs = Outputs()
        names = [f"{number}" for number in range(len(choices))]
        for name, choice in zip(names, choices, strict=True):
            ADD(outputs, SimpleNamespace(request_id=name), choice)
        for tokens in steps:
            STEP(outputs, [SimpleNamespace(request_id=name, new_token_ids=[7] * tokens) for name in names])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        sent.append(message)

    await answer_version.AnswerVersions(app)({"type": "http", "headers": []}, None, send)
    assert dict(sent[0]["headers"]).get(answer_version.COMPUTED_HEADER) == told
