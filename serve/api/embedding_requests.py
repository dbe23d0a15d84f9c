"""Reads a request for embeddings as one kind and not as all five.

vLLM tries a body as text, then as four forms of conversation, and writes an error for each token that is not a message:
0.9 s and 350 MB for 65,536 tokens, on the loop that answers every owner, where reading them as tokens takes 1 ms.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag
from vllm.entrypoints.pooling.embed import protocol


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


def _kind(body: Any) -> str:
    if not isinstance(body, dict) or "messages" in body:
        return "conversation"
    first = body.get("input")
    while isinstance(first, list) and first:
        first = first[0]
    return "conversation" if isinstance(first, dict) else "text"
