"""Manages LoRA adapters on a running engine: finds one by name when a request needs it and unloads unused ones.

An adapter is called `NAME@VERSION` here; the gateway puts that into a request's `model` field, so an engine needs no
list of adapters and a new version is a new name with a new path. The engine handles such a request as follows:

    vLLM asks its resolvers for an adapter it does not know     (vllm/lora/resolver.py)
    `EngineAdapters` finds its directory, leases it, and checks that it belongs to the weights being served; if no
    directory exists here, it asks the box, which copies the adapter in from any tier that has it
    vLLM's worker loads it and keeps up to `--max-cpu-loras`, evicting the least recently used; the step that needs an
    evicted adapter loads it again from its path

Rules
- An adapter belongs to one version of one base. An engine with other weights rejects it, and the gateway tries another.
- The engine holds the lease while a request can still cause a load: until the adapter is unloaded and all requests
  admitted before have ended.
- An adapter whose name is private (weights.format.names.POLICY_PREFIX) is a model in training. Only whoever asks for
  its job's rollouts gets answers by it; for everybody else it does not exist.
- While `closed`, the engine admits no adapter requests, because the base weights are about to change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.v1.engine.async_llm import AsyncLLM

from serve.adapters.load_turns import LoadTurns
from serve.adapters.source import AdapterUnavailable, brought_in
from serve.load.shm_source import VersionUnreadable, lease
from weights.format.errors import WeightsError
from weights.format.manifest import Manifest
from weights.format.names import decode_name, encode_name, policy_of
from weights.memory.locks import DirectoryLock

# The lookup admits a request some time before vLLM counts it as running, because vLLM renders its prompt in between.
LET_IN_S = 60.0
POLL_S = 0.01
NO_NUMBER = 1 << 31
"""The id of no adapter: one that is unloaded before it had its turn removes no other."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Known:
    """An adapter that requests may use. It is leased, and loaded now or later by the step that needs it."""

    request: LoRARequest
    held: DirectoryLock
    used_s: float


class _KnownRequests(dict):
    """vLLM's table of adapters by name, which records when a request last used each one."""

    def __init__(self, owner: EngineAdapters):
        super().__init__()
        self._owner = owner

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and self._owner.touch(str(name))


class EngineAdapters(LoRAResolver):
    """The adapters of one engine. Call all methods on its event loop.

    `source`: the box's socket for adapters outside the `roots`, "" if the box has none. `fetch_timeout_s`: how long a
    request waits for an adapter. for_rollouts and owner say of the request whose task asks whether it is for rollouts,
    and whose it is; uses is told the adapter that it has found. unbegun: requests that the engine does not have yet, by
    adapter: one whose adapter was unloaded meanwhile would end the engine.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        models: Any,
        roots: Sequence[str],
        resident: int,
        source: str,
        fetch_timeout_s: float,
        for_rollouts: Callable[[], bool],
        owner: Callable[[], str],
        uses: Callable[[str], None],
        unbegun: Callable[[], Counter[str]],
    ):
        self.closed = False
        self._for_rollouts, self._owner, self._uses, self._unbegun = for_rollouts, owner, uses, unbegun
        self._llm, self._models, self._roots, self._resident = llm, models, tuple(map(Path, roots)), resident
        self._source, self._fetch_timeout_s = source, fetch_timeout_s
        self._known: dict[str, Known] = {}
        self._base = ("", "")
        # vLLM loads what `resolve_lora` returns by the engine's own method.
        self._turns = LoadTurns(llm.output_processor.has_unfinished_requests)
        self._waiting: set[str] = set()
        # No request finds these any more. To resolve one anew would take it from the requests that have found it.
        self._unloading: set[str] = set()
        add_lora = llm.add_lora
        llm.add_lora = lambda request: self._turns.load(add_lora(request))
        self._requests = _KnownRequests(self)
        models.lora_requests = self._requests
        # Answers name the model that was asked for, without the version.
        models.model_name = self._shown_name
        LoRAResolverRegistry.register_resolver("shm", self)
        models.lora_resolvers = [self]

    def serve_on(self, version_path: str) -> None:
        """Set the weights that the engine now serves, which adapters must match, and admit requests."""
        directory = Path(version_path)
        self._base = (decode_name(directory.parent.name) or "", decode_name(directory.name) or "")
        self.closed = False

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """vLLM calls this for an unknown name and loads the result. None: this engine has no such adapter."""
        await self.forget_idle()
        if not self._may_use(lora_name):
            return None
        model, _, version = lora_name.rpartition("@")
        found = await self._leased(model, version) if model else None
        if found is None:
            return None
        held, path = found
        if not self._may_use(lora_name):
            held.close()
            return None
        # vLLM overwrites this number with the next of its counter, once this returns.
        request = LoRARequest(lora_name, NO_NUMBER, str(path))
        before = self._known.pop(lora_name, None)  # its load failed, or vLLM would not call this
        if before is not None:
            before.held.close()
        known = self._known[lora_name] = Known(request, held, time.monotonic())
        self._waiting.add(lora_name)
        try:
            await self._turns.take(self._owner())
        finally:
            self._waiting.discard(lora_name)
        if self._known.get(lora_name) is not known:  # it was unloaded, or the weights change
            self._turns.give_back()
            return None
        known.used_s = time.monotonic()
        return request

    def touch(self, name: str) -> bool:
        """Record that a request uses the adapter; False if requests may not use it now."""
        known = self._known.get(name)
        if known is None or not self._may_use(name):
            return False
        known.used_s = time.monotonic()
        self._uses(name)
        return True

    async def forget_idle(self) -> None:
        """Unload the least recently requested adapters if more are known than may stay loaded."""
        surplus = len(self._known) - self._resident
        if surplus <= 0:
            return
        busy, now_s = self._in_flight(), time.monotonic()
        oldest = sorted(self._known.items(), key=lambda item: item[1].used_s)
        for name, known in oldest[:surplus]:
            if name not in busy and name not in self._waiting and now_s - known.used_s >= LET_IN_S:
                await self._forget(name)

    async def unload(self, name: str, timeout_s: float) -> bool:
        """Unload an adapter before its deletion, once its requests have ended; False if it was unknown.

        The caller has already removed it from the routing table, and late requests get "does not exist". Raises
        TimeoutError, after which requests find it again.
        """
        if name not in self._known:
            return False
        self._unloading.add(name)
        try:
            await self._drained(timeout_s, name)
            await self._forget(name)
        finally:
            self._unloading.discard(name)
        return True

    async def close(self, timeout_s: float) -> None:
        """Prepare for a change of base weights: admit no adapter requests, wait for running ones, unload all adapters.

        After a timeout it admits requests again and raises TimeoutError.
        """
        self.closed = True
        try:
            await self._drained(timeout_s)
        except TimeoutError:
            self.closed = False
            raise
        for name in list(self._known):
            await self._forget(name)

    async def report(self) -> dict[str, Any]:
        """known: leased and ready for requests; resident: how many are loaded now."""
        workers = await self._llm.collective_rpc("shm_adapters")
        return {"known": sorted(self._known), "resident": workers[0]}

    def _may_use(self, name: str) -> bool:
        """Whether the request whose task calls this may use the adapter now, if it exists."""
        return not self.closed and name not in self._unloading and (policy_of(name) is None or self._for_rollouts())

    async def _leased(self, model: str, version: str) -> tuple[DirectoryLock, Path] | None:
        found = await asyncio.to_thread(self._find, model, version)
        if found is not None or not self._source:
            return found
        try:
            async with brought_in(self._source, f"{model}@{version}", self._fetch_timeout_s):
                return await asyncio.to_thread(self._find, model, version)
        except AdapterUnavailable as error:
            log.error("%s", error)
            return None

    def _find(self, model: str, version: str) -> tuple[DirectoryLock, Path] | None:
        for root in self._roots:
            try:
                path = root / encode_name(model) / encode_name(version)
                held = lease(path)
            except (VersionUnreadable, WeightsError):
                continue
            try:
                manifest = Manifest.read(path)
            except (WeightsError, OSError):
                held.close()
                continue
            base = (manifest.meta.get("base"), manifest.meta.get("base_version"))
            if manifest.kind == "adapter" and base == self._base:
                return held, path
            held.close()
        return None

    def _in_flight(self) -> set[str]:
        states = self._llm.output_processor.request_states.values()
        running = {state.lora_request.lora_name for state in states if state.lora_request is not None}
        return running | {name for name in self._unbegun() if name}

    async def _drained(self, timeout_s: float, name: str | None = None) -> None:
        async with asyncio.timeout(timeout_s):
            while (busy := self._in_flight()) and (name is None or name in busy):
                await asyncio.sleep(POLL_S)

    async def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is None:  # somebody else unloaded it meanwhile
            return
        self._requests.pop(name, None)
        await self._llm.remove_lora(known.request.lora_int_id)
        known.held.close()

    def _shown_name(self, lora_request: LoRARequest | None = None) -> str:
        if lora_request is not None:
            return lora_request.lora_name.rpartition("@")[0]
        return self._models.base_model_paths[0].name
