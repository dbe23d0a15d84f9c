"""What an engine keeps of pictures and of forms, it keeps for each owner apart.

vLLM has one cache of pictures for all requests, by what is in them, and xgrammar one of compiled rules: by the time of
an answer one could tell that somebody else had sent the same picture, or asked for a form with the same part, before (a
text of bounded length took 0.02 s instead of 0.9). The gateway gives requests a `cache_salt` by their owner, and none
where the box is one team's (`prefix_cache_shared`). Those with the same salt share what is kept of pictures, as they
share the prefixes of prompts. Compiled forms are kept by the owner's part of it alone: with eight salts of its own, a
client had everybody's dropped.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_SALT: ContextVar[str] = ContextVar("cache_salt", default="")
_COMPILER_BYTES = 8 << 10
"""Of one that has compiled nothing, about."""


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
        _SALT.set(request.cache_salt or "")
        return create(self, request)

    @functools.wraps(compile_grammar)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        own, compilers = copy.copy(self), self.compiler.shm_of
        own.compiler = compilers.of(_owner(_SALT.get()))
        try:
            return compile_grammar(own, *args, **kwargs)
        finally:
            compilers.trim()

    @functools.wraps(init)
    def made(self: Any, tokens: Any, *, cache_limit_bytes: int = -1, **more: Any) -> None:
        init(self, tokens, cache_limit_bytes=cache_limit_bytes, **more)
        make = functools.partial(compiler, tokens, cache_limit_bytes=cache_limit_bytes, **more)
        self.shm_of = _Compilers(make, cache_limit_bytes)

    manager._create_grammar, backend.compile_grammar, compiler.__init__ = _create_grammar, compiled, made


def _owner(salt: str) -> str:
    """Behind a dot is what a client chose (appliance/gateway/routing/table.py). Where the gateway gives none
    (`prefix_cache_shared`) it is empty, or what a client chose."""
    return salt.partition(".")[0]


class _Compilers:
    """One for each owner. Their caches have `limit` bytes in all, about, as xgrammar's has; below 0 there is none."""

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        self._make, self._limit, self._lock, self._of = make, limit, threading.Lock(), dict[str, Any]()

    def of(self, owner: str) -> Any:
        with self._lock:
            found = self._of[owner] = self._of.pop(owner, None) or self._make()
            return found

    def trim(self) -> None:
        """Each may hold the limit alone, where nobody else asks. Else whoever holds most loses it, among equals who has
        not asked for longest: so nobody can have another's dropped who holds less."""
        with self._lock:
            if self._limit < 0:
                return
            # At its own limit a compiler has some bytes more, for which one alone would lose everything.
            counted = {owner: one.get_cache_size_bytes() + _COMPILER_BYTES for owner, one in self._of.items()}
            sizes = {owner: min(size, self._limit) for owner, size in counted.items()}
            total = sum(sizes.values())
            while total > self._limit:
                most = max(sizes, key=sizes.__getitem__)
                total -= sizes.pop(most)
                del self._of[most]
