"""Removes vLLM's own fields from stream chunks unless the request asked for them.

vLLM's chunks always contain `token_ids`, `prompt_token_ids` and `prompt_text`, as null if not requested; OpenAI's
chunks do not have them. vLLM's `exclude_unset` omits fields that are not set, so this module does not set them: less to
write per token, and nothing to remove from the bytes later.
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
    """Call once per process: the serving classes create their chunks through these names in their modules."""
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
