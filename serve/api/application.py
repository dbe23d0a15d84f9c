"""Sets up vLLM's application: handlers of errors, the shapes of answers, and a faster way to read embedding requests.

Once vLLM has built the application and its state, our subclasses take the places of vLLM's handlers in that state,
where its routes look for them: vLLM has no option for their classes.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from vllm.entrypoints.pooling.embed import protocol as embeddings
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

from serve.api.answer_shapes import Chat, Messages
from serve.api.answers import fault_of
from serve.api.request_faults import KINDS

# vLLM tries five models for each and writes an error for every token that is not a message: 4 s for 100,000 tokens, on
# the loop that answers every owner.
EmbeddingBody = Annotated[  # type: ignore[valid-type]
    Annotated[get_args(embeddings.EmbeddingRequest)[0], Field(union_mode="left_to_right")],
    BeforeValidator(embeddings.reject_removed_pooling_parameters),
]


def set_up(app: Any) -> None:
    """app: the FastAPI application of vLLM's build_app, after init_app_state and before it answers."""
    for kind in KINDS:
        app.add_exception_handler(kind, _answer_fault)
    for name, own in (("openai_serving_chat", Chat), ("anthropic_serving_messages", Messages)):
        if (handler := getattr(app.state, name, None)) is not None:
            handler.__class__ = own
    if getattr(app.state, "serving_embedding", None) is not None:
        app.add_api_route("/v1/embeddings", _embed, methods=["POST"])
        app.router.routes.insert(0, app.router.routes.pop())


async def _answer_fault(request: Request, error: Exception) -> Any:
    return await exception_handler(request, fault_of(error))


async def _embed(request: EmbeddingBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    from vllm.entrypoints.pooling.embed.api_router import create_embedding

    return await create_embedding(request=request, raw_request=raw_request)
