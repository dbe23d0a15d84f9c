"""Requests for embeddings are read as one kind."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter
from vllm.entrypoints.pooling.embed import protocol

from serve.api import embedding_requests

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"input": "a"}, "EmbeddingCompletionRequest"),
        ({"input": [[1, 2], [3]]}, "EmbeddingCompletionRequest"),
        ({"messages": MESSAGES}, "EmbeddingChatRequest"),
        ({"input": [MESSAGES]}, "EmbeddingBatchChatInputRequest"),
    ],
)
def test_request_is_read_as_its_own_kind(monkeypatch: pytest.MonkeyPatch, more: dict, kind: str) -> None:
    monkeypatch.setattr(protocol, "EmbeddingRequest", protocol.EmbeddingRequest)
    embedding_requests.apply()
    read = TypeAdapter(protocol.EmbeddingRequest).validate_python({"model": "m", **more})
    assert type(read).__name__ == kind
