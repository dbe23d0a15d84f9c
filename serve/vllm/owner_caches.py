"""What an engine keeps of pictures and of forms, it keeps for each owner apart.

vLLM has one cache of pictures for all requests, by what is in them, and xgrammar one of compiled rules: by the time of
an answer one could tell that somebody else had sent the same picture, or asked for a form with the same part, before (a
text of bounded length took 0.02 s instead of 0.9). The gateway gives requests a `cache_salt` by their owner, and none
where the box is one team's (`prefix_cache_shared`). Those with the same salt share these caches, as they share the
prefixes of prompts.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

OWNERS = 8
"""For so many, those who asked last, compiled rules are kept; each has an equal part of the memory vLLM gives them."""
_SALT: ContextVar[str] = ContextVar("cache_salt", default="")


def salt_pictures(renderer: Any, inputs: Any) -> None:
    """renderer: BaseRenderer, whose threads run in the context of who asks (serve.api.fair_order); inputs:
    MMProcessorInputs, whose hashes name what the frontend and the core keep."""
    process, hashes = renderer._process_tokens_async, inputs.get_mm_hashes

    @functools.wraps(process)
    async def _process_tokens_async(self: Any, prompt: Any, **more: Any) -> Any:
        _SALT.set(prompt.get("cache_salt") or "")
        return await process(self, prompt, **more)

    @functools.wraps(hashes)
    def get_mm_hashes(self: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        found, salt = hashes(self, *args, **kwargs), _SALT.get()
        return {kind: [f"{salt}:{one}" for one in each] for kind, each in found.items()} if salt else found

    renderer._process_tokens_async, inputs.get_mm_hashes = _process_tokens_async, get_mm_hashes


def compile_apart(manager: Any, backend: Any, compiler: Any) -> None:
    """manager: StructuredOutputManager; backend: XgrammarBackend, which makes one `compiler`, a GrammarCompiler."""
    create, compile_grammar, init = manager._create_grammar, backend.compile_grammar, compiler.__init__

    @functools.wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        # On a CPU it begins with a salt of the version that serves.
        _SALT.set((request.cache_salt or "").removeprefix(getattr(request, "shm_salt", "")))
        return create(self, request)

    @functools.wraps(compile_grammar)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = copy.copy(self)
        own.compiler = self.compiler.shm_of.owner(_SALT.get())
        return compile_grammar(own, *args, **kwargs)

    @functools.wraps(init)
    def made(self: Any, tokens: Any, *, cache_limit_bytes: int = -1, **more: Any) -> None:
        init(self, tokens, cache_limit_bytes=cache_limit_bytes, **more)
        part = cache_limit_bytes // OWNERS
        self.shm_of = _Compilers(lambda: compiler(tokens, cache_limit_bytes=part, **more))

    manager._create_grammar, backend.compile_grammar, compiler.__init__ = _create_grammar, compiled, made


class _Compilers:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock, self._of = make, threading.Lock(), dict[str, Any]()

    def owner(self, salt: str) -> Any:
        with self._lock:
            found = self._of[salt] = self._of.pop(salt, None) or self._make()
            if len(self._of) > OWNERS:
                del self._of[next(iter(self._of))]
            return found
