"""Resolves LoRA adapters by name for one engine, and keeps their files in place while requests may need them.

The gateway names an adapter `NAME@VERSION` in a request's `model` field, so an engine needs no list of adapters, and a
new version is a new name. vLLM asks its resolvers for a name it does not know, loads the result, and keeps up to
`--max-cpu-loras` of them; a step that needs an evicted adapter loads it again from its path.

- An adapter belongs to one version of one base. An engine with other weights does not find it, and the gateway tries
  another engine.
- An adapter's directory is leased as long as anything refers to its `HeldAdapter`: vLLM's table or a request.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver
from vllm.v1.engine.async_llm import AsyncLLM

from serve.adapters.source import AdapterUnavailable, brought_in
from serve.api import answers
from serve.core.spec import ReplicaSpec
from serve.load.shm_source import VersionUnreadable, lease
from weights.format.errors import WeightsError
from weights.format.manifest import Manifest
from weights.format.names import decode_name, encode_name
from weights.memory.locks import DirectoryLock

POLL_S = 0.01

log = logging.getLogger(__name__)


class HeldAdapter(LoRARequest, weakref=True):
    """A LoRARequest whose end of life is noticed. vLLM's table refers to it, and each request until its end."""


class LoadedAdapters(LRUCache[str, LoRARequest]):
    """vLLM's table of adapters by name. vLLM looks a request's adapter up twice, and others may have evicted it in
    between: what a request has found it finds until the core has the request."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            _found(super().__getitem__(str(name)))
            return True
        return _found_before(name) is not None

    def __getitem__(self, name: str) -> LoRARequest:
        return _found_before(name) or super().__getitem__(name)

    def __setitem__(self, name: str, adapter: LoRARequest) -> None:
        super().__setitem__(name, adapter)  # which looks for those that it evicts
        _found(adapter)


def _found(adapter: LoRARequest) -> None:
    if (answer := answers.current()) is not None and not answer.begun:
        answer.adapter = adapter


def _found_before(name: object) -> LoRARequest | None:
    answer = answers.current()
    adapter = answer.adapter if answer is not None else None
    return adapter if adapter is not None and adapter.lora_name == name else None


class EngineAdapters(LoRAResolver):
    """The adapters of one engine. Call all methods on its event loop.

    Args:
        models: vLLM's OpenAIServingModels.
        fetch_timeout_s: how long a request waits for an adapter that the box has to copy in.
    """

    def __init__(self, llm: AsyncLLM, models: Any, spec: ReplicaSpec, fetch_timeout_s: float) -> None:
        self._llm, self._spec, self._fetch_timeout_s = llm, spec, fetch_timeout_s
        self._base: tuple[str | None, str | None] | None = None
        self._alive = weakref.WeakValueDictionary[int, HeldAdapter]()
        self._loaded = LoadedAdapters(max(1, spec.adapters_resident))
        models.lora_requests, models.lora_resolvers = self._loaded, [self]
        # Answers name the model without the version.
        models.model_name = lambda adapter=None: (
            adapter.lora_name.rpartition("@")[0] if adapter else models.base_model_paths[0].name
        )

    def serve_on(self, version_path: str) -> None:
        """Set the weights that the engine now serves, which adapters must match."""
        directory = Path(version_path)
        self._base = decode_name(directory.parent.name), decode_name(directory.name)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """vLLM calls this for an unknown name, numbers the result and loads it. None: this engine has no such adapter,
        or its weights are about to change."""
        base = self._base
        held = await asyncio.to_thread(self._find, lora_name)
        if held is None and self._spec.adapter_source:
            try:
                async with brought_in(self._spec.adapter_source, lora_name, self._fetch_timeout_s):
                    held = await asyncio.to_thread(self._find, lora_name)
            except AdapterUnavailable as error:
                log.error("%s", error)
        if held is None or base is None or self._base != base:
            return None
        lock, path = held
        adapter = HeldAdapter(lora_name, 1, str(path))
        self._alive[id(adapter)] = adapter
        weakref.finalize(adapter, lock.close)
        return adapter

    async def unload(self, name: str, timeout_s: float) -> bool:
        """Forget an adapter once its requests have ended, before its files are deleted; False if it was unknown.

        The caller has already removed it from the routing table. Raises TimeoutError.
        """
        if not self._uses_of(name):
            return False
        await self._ended(timeout_s, name)
        return True

    async def close(self, timeout_s: float) -> None:
        """Find no adapters until `serve_on`, and unload all once their requests have ended. Raises TimeoutError; after
        any error adapters are found again."""
        base, self._base = self._base, None
        try:
            await self._ended(timeout_s)
            for number in await self._llm.list_loras():
                await self._llm.remove_lora(number)
        except Exception:
            self._base = base
            raise

    def _uses_of(self, name: str | None) -> bool:
        return any(name in (None, adapter.lora_name) for adapter in self._alive.values())

    async def _ended(self, timeout_s: float, name: str | None = None) -> None:
        async with asyncio.timeout(timeout_s):
            while self._uses_of(name):
                for known in list(self._loaded) if name is None else [name]:
                    self._loaded.pop(known, None)  # a late request may have loaded it again
                await asyncio.sleep(POLL_S)
        await self._llm.list_loras()  # the core has taken notice of requests that were aborted

    def _find(self, name: str) -> tuple[DirectoryLock, Path] | None:
        model, _, version = name.rpartition("@")
        for root in map(Path, self._spec.adapter_roots):
            try:
                path = root / encode_name(model) / encode_name(version)
                lock, manifest = lease(path), Manifest.read(path)
            except (VersionUnreadable, WeightsError, OSError):
                continue
            if (
                manifest.kind == "adapter"
                and (manifest.meta.get("base"), manifest.meta.get("base_version")) == self._base
            ):
                return lock, path
        return None
