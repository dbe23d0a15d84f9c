"""Resolves LoRA adapters by name for one engine, and leases their files while requests may need them.

The gateway names an adapter `NAME@VERSION` in a request's `model` field. vLLM passes an unknown name to its resolvers,
loads the result, and keeps up to `--max-cpu-loras` adapters; a step that needs an evicted adapter loads it again from
its path. So the directory is leased as long as vLLM's table or a request refers to its `HeldAdapter`. An adapter
belongs to one version of one base: an engine with other weights does not resolve it, and the gateway tries another.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver
from vllm.v1.engine.async_llm import AsyncLLM

from serve.core.adapter_source import AdapterUnavailable, brought_in
from serve.core.errors import WrongState
from serve.core.spec import ReplicaSpec
from serve.load.shm_source import VersionUnreadable, lease
from serve.vllm import answers
from weights.format.errors import WeightsError
from weights.format.manifest import Manifest
from weights.format.names import decode_name, encode_name
from weights.memory.locks import DirectoryLock

POLL_S = 0.01

log = logging.getLogger(__name__)


class HeldAdapter(LoRARequest, weakref=True):
    """A LoRARequest that supports weak references. vLLM's table and each of its unfinished requests refer to it."""


class LoadedAdapters(LRUCache[str, LoRARequest]):
    """vLLM's table of adapters by name. vLLM looks up a request's adapter twice, and the adapter may be evicted in
    between: so the first lookup's adapter is held until the core has the request."""

    def __contains__(self, name: object) -> bool:
        known, answer = super().__contains__(name), answers.current()
        if answer is None or answer.begun:
            return known
        if known:
            answer.adapter = super().__getitem__(str(name))
        return answer.adapter is not None and answer.adapter.lora_name == name

    def __missing__(self, name: str) -> LoRARequest:
        if name not in self:
            raise KeyError(name)
        return answers.current().adapter  # type: ignore[union-attr, return-value]

    def __setitem__(self, name: str, adapter: LoRARequest) -> None:
        super().__setitem__(name, adapter)
        self.__contains__(name)


class EngineAdapters(LoRAResolver):
    """The adapters of one engine, which may accept no adapters. Call all methods on the engine's event loop.

    models: vLLM's OpenAIServingModels. limits: values of EngineConfig.
    """

    def __init__(self, llm: AsyncLLM, models: Any, spec: ReplicaSpec, limits: Mapping[str, float]) -> None:
        self._llm, self._spec, self._limits = llm, spec, limits
        self._base: tuple[str | None, str | None] | None = None
        self._alive = weakref.WeakValueDictionary[int, HeldAdapter]()
        self._loaded = LoadedAdapters(max(1, spec.adapters_resident))
        models.lora_requests, models.lora_resolvers = self._loaded, [self]
        # responses name the model without its version
        models.model_name = lambda adapter=None: (
            adapter.lora_name.rpartition("@")[0] if adapter else models.base_model_paths[0].name
        )

    def serve_on(self, version_path: str) -> None:
        """Set the weights that the engine now serves, which adapters must match."""
        directory = Path(version_path)
        self._base = decode_name(directory.parent.name), decode_name(directory.name)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter for a name that vLLM does not know; vLLM then loads the adapter. None: this engine has no
        such adapter, or the engine's weights are about to change."""
        base = self._base
        held = await asyncio.to_thread(self._find, lora_name)
        if held is None and self._spec.adapter_source:
            try:
                async with brought_in(self._spec.adapter_source, lora_name, self._limits["adapter_fetch_timeout_s"]):
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

    async def unload(self, name: str) -> bool:
        """Unload the adapter `NAME@VERSION` once its requests have ended, so that its files can be deleted; False if it
        was not loaded. Remove the adapter from the routing table first. Raises WrongState."""
        if not self._uses_of(name):
            return False
        await self._ended(name)
        return True

    async def close(self) -> None:
        """Stop resolving adapters until `serve_on`, and unload all adapters once their requests have ended. Raises
        WrongState. After an error adapters are resolved again."""
        if not self._spec.adapter_slots:
            return
        base, self._base = self._base, None
        try:
            await self._ended()
            for number in await self._llm.list_loras():
                await self._llm.remove_lora(number)
        except Exception:
            self._base = base
            raise

    def _uses_of(self, name: str | None) -> bool:
        return any(name in (None, adapter.lora_name) for adapter in self._alive.values())

    async def _ended(self, name: str | None = None) -> None:
        try:
            async with asyncio.timeout(self._limits["adapter_drain_timeout_s"]):
                while self._uses_of(name):
                    for known in list(self._loaded) if name is None else [name]:
                        self._loaded.pop(known, None)  # a late request may have reloaded the adapter
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise WrongState(f"{name or 'adapters'} still have requests; route them elsewhere") from error
        await self._llm.list_loras()  # returns once the core has handled aborted requests

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
