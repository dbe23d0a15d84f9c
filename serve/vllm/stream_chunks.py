"""Chunks of a stream without vLLM's own fields that nobody asked for.

vLLM names `token_ids`, `prompt_token_ids` and `prompt_text` in its chunks whether they were asked for or not, as null
where not; OpenAI's chunks do not have them. Its own `exclude_unset` leaves a field out that was not given, so they are
not given: less to write for each token, and nothing to take out of the bytes later.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion

UNASKED = ("token_ids", "prompt_token_ids", "prompt_text")
MADE_OF = (
    (chat, "ChatCompletionResponseStreamChoice"),
    (chat, "ChatCompletionStreamResponse"),
    (completion, "CompletionResponseStreamChoice"),
)


def apply() -> None:
    """Once per process: the serving classes make their chunks by these names of their modules."""
    for module, name in MADE_OF:
        setattr(module, name, _without_nulls(getattr(module, name)))


def _without_nulls(made: type[Any]) -> Any:
    @functools.wraps(made, updated=())
    def make(**fields: Any) -> Any:
        for name in UNASKED:
            if name in fields and fields[name] is None:
                del fields[name]
        return made(**fields)

    return make
