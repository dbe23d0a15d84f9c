"""A form that its answer cannot follow is the request's fault, whenever an engine finds out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from serve.forms import impossible_forms


def output(tokens: list[int], finish_reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=finish_reason)])


async def told(*outputs: Any) -> list[Any]:
    async def all_of_them() -> AsyncGenerator[Any, None]:
        for one in outputs:
            yield one

    return [one async for one in impossible_forms._or_refused(all_of_them())]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([output([], "error")], impossible_forms.IMPOSSIBLE),
        # A plain request's only output; vLLM sends the token that the grammar refused.
        ([output([1, 2, 3], "error")], impossible_forms.UNFOLLOWED),
        # A stream's.
        ([output([1], None), output([2], "error")], impossible_forms.UNFOLLOWED),
        ([output([1], None), output([], "error")], impossible_forms.UNFOLLOWED),
    ],
)
async def test_it_is_a_refusal_in_words_of_the_request(outputs: list[Any], words: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        await told(*outputs)
    assert words in str(refused.value)


async def test_other_answers_pass() -> None:
    given = [output([1], None), output([2], "length")]
    assert await told(*given) == given
