"""Makes each answer name the version whose steps computed it (`system_fingerprint`, a header).

vLLM gives a serving class one fingerprint for its lifetime and reads it when an answer ends. Here versions change
during open answers. The engine core labels its outputs with the version of their step; this module records the label
for the answer they belong to.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.lora.request import LoRARequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

# The gateway reads it (appliance/gateway/http/wire.py), because its table can lag behind the engine.
VERSION_HEADER = b"x-appliance-model-version"


@dataclass(slots=True, eq=False)
class Answer:
    """State of one HTTP answer. states: of the requests that the core got for it. adapter: that it has found."""

    states: list[RequestState] = field(default_factory=list)
    adapter: LoRARequest | None = None

    @property
    def begun(self) -> bool:
        """Whether the core has the request."""
        return bool(self.states)

    @property
    def version(self) -> str | None:
        """Version of the newest token; None until the first token."""
        starts = [state.weight_version_starts[-1] for state in self.states if state.weight_version_starts]
        return starts[-1][0] if starts else None


_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_open: set[Answer] = set()


def current() -> Answer | None:
    """The Answer of the request whose task calls this; None outside of a request."""
    return _ANSWER.get()


def unbegun() -> int:
    """How many open requests the engine does not have yet. Whoever drains the engine waits for them too."""
    return sum(not answer.begun for answer in _open)


class AnswerVersions:
    """ASGI application around vLLM's, which gives each request an Answer. Tasks that vLLM starts inherit it.

    It delays the head of an answer until the first body chunk: then the first token exists, and the head names the
    version that computed it.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = Answer()
        _ANSWER.set(answer)
        _open.add(answer)
        head: list[Any] = []

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.append(message)
                return
            if head:
                start = head.pop()
                if answer.version is not None:
                    named = (VERSION_HEADER, answer.version.encode())
                    start = {**start, "headers": [*start.get("headers", ()), named]}
                await send(start)
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        finally:
            _open.discard(answer)
            answer.adapter = None  # contexts of vLLM's tasks may keep the answer
            answer.states.clear()


def apply() -> None:
    """Patch vLLM 0.32's frontend. Called once (serve.vllm.patches)."""
    GenerateBaseServing.system_fingerprint = property(_fingerprint, _set_fingerprint)
    OutputProcessor.add_request = _for_this_answer(OutputProcessor.add_request)


def _fingerprint(serving: GenerateBaseServing) -> str | None:
    answer = _ANSWER.get()
    return serving.__dict__["shm_version"] if answer is None or answer.version is None else answer.version


def _set_fingerprint(serving: GenerateBaseServing, version: str | None) -> None:
    serving.__dict__["shm_version"] = version


def _for_this_answer(add_request):
    @functools.wraps(add_request)
    def run(processor: OutputProcessor, request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(processor, request, *args, **kwargs)
        if (answer := _ANSWER.get()) is not None:
            answer.states.append(processor.request_states[request.request_id])

    return run
