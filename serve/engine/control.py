"""Implements swap, sleep, wake and fingerprint inside the engine's API process.

The phases of a swap, in order:

    check       configuration, tokenizer and every tensor against the engine       (nothing touched yet)
    try         before the first layerwise load of an engine: the served version again, which has to answer as before
    stage       map the new version, and on a GPU lock its pages (requests continue)
    pause       keep requests and clear the prefix cache, which other weights computed
    transfer    vLLM's start_weight_update, update_weights, finish_weight_update
    fingerprint one forward pass, compared with the version's recorded fingerprint
    resume
    rename      the served model name and version become the new ones

Rules
- Unverified or mixed weights compute no token: between a pause and its resumption only the fingerprint runs.
- A request running at the pause is recomputed with the new weights and goes on.
- After an error in or after the pause, the engine reloads the old version by the same transfer, fingerprint included,
  and resumes. If that fails too, it stays paused for ever, and EngineFailed tells the supervisor to kill it.
- One operation at a time (`_lock`); a sleeping engine takes only `wake`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from runtime.devices.kinds import kind_of
from runtime.processes.kernel import group_resident_bytes, group_rss_bytes
from serve.adapters.adapters import EngineAdapters
from serve.api import answer_version
from serve.core.errors import (
    BY_NAME,
    EngineFailed,
    NotFinite,
    ReloadFailed,
    ServeError,
    SwapFailed,
    VersionBroken,
    WrongState,
)
from serve.core.fingerprint import FingerprintBook, FingerprintRecord, fingerprint_prompt, version_key
from serve.core.model_settings import rounding
from serve.core.sampling import ROLLOUTS
from serve.core.spec import ReplicaSpec
from serve.engine.start_errors import out_of_memory
from serve.load.shm_source import lease
from serve.load.version_check import ModelIdentity, check_alike, check_same_model
from weights.memory.locks import DirectoryLock

logger = logging.getLogger(__name__)
HOW = ("auto", "in-place", "layerwise")
STAGE_POLL_S = 0.005
PROFILE_POLL_S = 0.02  # each look is a call between two steps
DRAIN_GRACE_S = 2.0


class EngineControl:
    """Owns the engine's state: `ready`, `asleep` or `failed`, and which version it serves."""

    def __init__(self, llm: AsyncLLM, app_state: Any, spec: ReplicaSpec, limits: dict[str, float], group: int):
        self.llm, self.spec = llm, spec
        self.model, self.version, self.path = spec.model, spec.version, spec.version_path
        self.state = "ready"
        self._app_state, self._limits, self._group = app_state, limits, group
        self._book = FingerprintBook(spec.shm_root)
        self._identity = ModelIdentity.read(spec.version_path)
        # Held while the engine serves the version: the store writes new bytes into the files of evicted versions, and a
        # failed swap must find the old version unchanged.
        self._lease: DirectoryLock | None = lease(spec.version_path)
        self._lock = asyncio.Lock()
        self._profiles = False
        self._reloads = False  # vLLM's own reload has answered as a first load of the same version did
        self._prompt = fingerprint_prompt(llm.model_config.get_vocab_size())
        self._pooling_task = "embed" if spec.task == "embed" else None
        self._adapters: EngineAdapters | None = None
        if spec.adapter_slots:
            models = app_state.openai_serving_models
            self._adapters = EngineAdapters(
                llm,
                models,
                spec.adapter_roots,
                spec.adapters_resident,
                spec.adapter_source,
                limits["adapter_fetch_timeout_s"],
                _for_rollouts,
                answer_version.owner,
                answer_version.uses,
                answer_version.unbegun,
            )
            self._adapters.serve_on(spec.version_path)

    # -- calls over the lifeline --------------------------------------------------------------------------------

    async def first_fingerprint(self) -> dict[str, Any]:
        """Compute the fingerprint of the engine's first load, before it serves anything."""
        await self.llm.engine_core.set_weight_version_async(self.version)
        fingerprint = await self._fingerprint("load")
        await self._give_back()
        return fingerprint

    async def status(self) -> dict[str, Any]:
        """State, version, memory in bytes (shared pages divided by their sharers), numbers of running and held-back
        requests."""
        try:
            running, waiting = await self.llm.engine_core.call_utility_async("shm_request_counts")
            state = self.state
        except EngineDeadError:
            running, waiting, state = 0, 0, "dead"
        return {
            "state": state,
            "model": self.model,
            "version": self.version,
            "rss_bytes": await asyncio.to_thread(group_rss_bytes, self._group),
            "running": running,
            "waiting": waiting,
            "adapters": None if self._adapters is None or state != "ready" else await self._adapters.report(),
        }

    async def pulse(self) -> None:
        """Returns once the core has answered, which it does between two steps, asleep too."""
        await self.llm.engine_core.call_utility_async("shm_request_counts")

    async def unload_adapter(self, name: str) -> bool:
        """Unload the adapter `NAME@VERSION` once its requests have ended; False if this engine does not know it."""
        if self._adapters is None:
            return False
        try:
            return await self._adapters.unload(name, self._limits["adapter_drain_timeout_s"])
        except TimeoutError as error:
            raise WrongState(f"the adapter {name} still has requests") from error

    async def fingerprint(self) -> dict[str, Any]:
        """Compute the fingerprint of the current weights and compare it with the record. Pauses the engine."""
        async with self._lock:
            self._require("ready", "fingerprint")
            await self._pause()
            try:
                return await self._fingerprint("transfer")
            finally:
                await self.llm.resume_generation()

    async def profile(self, steps: int, limit_s: float, path: str) -> dict[str, Any]:
        """Where the time of the engine's next steps goes, on its first worker; requests go on, somewhat slower. It ends
        with fewer steps after `limit_s`. The trace goes to `path`."""
        self._require("ready", "profile")
        if self._profiles:
            raise WrongState("the engine is being profiled already")
        self._profiles, until_s = True, time.monotonic() + limit_s
        try:
            await self.llm.collective_rpc("shm_profile_begin")
            try:
                while (await self.llm.collective_rpc("shm_profile_steps"))[0] < steps and time.monotonic() < until_s:
                    await asyncio.sleep(PROFILE_POLL_S)
            finally:
                found = (await self.llm.collective_rpc("shm_profile_end", args=(path,)))[0]
            return {**found, "model": self.model, "version": self.version}
        finally:
            self._profiles = False

    async def swap(self, model: str, version: str, version_path: str, how: str = "auto") -> dict[str, Any]:
        """Serve another version of the same architecture under the name `model`.

        `how` is "auto" (in place where the layout allows), "in-place" or "layerwise". Returns total and per-phase
        `seconds`, `pause_s` (no step runs; `drain_step_s` is the remainder of the step that ran when the pause was
        requested), `bytes_read` per worker, `how` the swap was done and `why`, and `fingerprint_s` (its time after the
        load). Raises VersionError (untouched), SwapFailed (old version serving), EngineFailed (kill it).
        """
        if how not in HOW:
            raise ValueError(f"how is {how!r}, expected one of {', '.join(HOW)}")
        async with self._lock:
            self._require("ready", "swap")
            began_s = time.perf_counter()
            await asyncio.to_thread(check_same_model, self._identity, version_path)
            held = lease(version_path)
            facts = await self._check(version_path)
            why = facts["layerwise_reason"]
            if why is not None and not self._reloads:
                await self._pause()
                await self._bring_back(None)
            layerwise = how == "layerwise" or why is not None
            record = await asyncio.to_thread(self._record_of, version_path)
            await self._stage(version_path)
            await self._close_adapters(version_path)
            staged_s = time.perf_counter()
            try:
                loaded = await self._load_paused(version, version_path, record, layerwise=layerwise)
            except EngineDeadError as error:
                self.state = "failed"
                raise EngineFailed(f"the engine died while it loaded {version_path}") from error
            except Exception as error:  # noqa: BLE001 - whatever failed, restore the old version first
                await self._bring_back(error)
                raise _swap_failed(error)(
                    f"{self.model} {self.version} is back and serving; {version_path} failed to load: {error}"
                ) from error
            self._rename(model, version, version_path, held)
            await self.llm.collective_rpc("shm_unmap")
            return {
                "model": model,
                "version": version,
                **_as_workers_report(loaded["reports"]),
                "why": why or ("default" if how == "auto" else "requested"),
                "bytes": facts["bytes"],
                "seconds": time.perf_counter() - began_s,
                "stage_s": staged_s - began_s,
                "pause_s": loaded["pause_s"],
                "drain_step_s": loaded["wait_s"],
                "fingerprint_s": loaded["fingerprint_s"],
                "fingerprint": await asyncio.to_thread(record.keep, loaded["fingerprint"]),
            }

    async def _load_paused(
        self, version: str, version_path: str, record: FingerprintRecord, *, layerwise: bool
    ) -> dict[str, Any]:
        """Load a version into the paused engine and check it there."""
        asked_s = time.perf_counter()
        await self._pause()
        paused_s = time.perf_counter()
        loaded = await self._load(version, version_path, layerwise=layerwise)
        fingerprint = record.check(loaded["answer"], "transfer")
        await self.llm.resume_generation()
        times = {"pause_s": time.perf_counter() - paused_s, "wait_s": paused_s - asked_s}
        return {**loaded, **times, "fingerprint": fingerprint}

    async def sleep(self) -> dict[str, Any]:
        """Free weights and KV memory. The caller has drained the engine; if requests remain after a short grace period,
        it raises WrongState."""
        async with self._lock:
            self._require("ready", "sleep")
            deadline_s = time.perf_counter() + DRAIN_GRACE_S
            processor = self.llm.output_processor
            while unfinished := processor.get_num_unfinished_requests() + answer_version.unbegun().total():
                # vLLM's engine dies when it sleeps with decodes in flight (vllm#45520).
                if time.perf_counter() > deadline_s:
                    raise WrongState(f"engine still has {unfinished} requests; drain it before sleep")
                await asyncio.sleep(0.01)
            before = await asyncio.to_thread(group_resident_bytes, self._group)
            began_s = time.perf_counter()
            await self._close_adapters(None)
            await self.llm.collective_rpc("shm_sleeping")
            # "keep": vLLM recomputes a request that arrived since the check after the wake instead of aborting it.
            await self.llm.sleep(level=2, mode="keep")
            self.state, self._lease = "asleep", None
            seconds = time.perf_counter() - began_s
            after = await asyncio.to_thread(group_resident_bytes, self._group)
            return {"seconds": seconds, "rss_before_bytes": before, "rss_after_bytes": after}

    async def wake(self, model: str, version: str, version_path: str) -> dict[str, Any]:
        """Wake with the weights of `version_path`, which may differ from the version before the sleep.

        It serves nothing before the fingerprint matches. Raises VersionError (still asleep) or EngineFailed.
        """
        async with self._lock:
            self._require("asleep", "wake")
            began_s = time.perf_counter()
            await asyncio.to_thread(check_same_model, self._identity, version_path)
            held = lease(version_path)
            await self._check(version_path)
            record = await asyncio.to_thread(self._record_of, version_path)
            try:
                await self.llm.wake_up(tags=["weights"])
                loaded = await self._load(version, version_path, wake_kv=True)
                fingerprint = record.check(loaded["answer"], "transfer")
                self._note_reload(loaded, record)
            except Exception as error:  # noqa: BLE001 - no old weights to restore: the engine is lost
                self.state = "failed"
                raise _engine_failed(error)(f"{version_path} failed to load into the waking engine: {error}") from error
            await self._give_back()
            self._rename(model, version, version_path, held)
            self.state = "ready"
            await self.llm.resume_generation()
            await self.llm.collective_rpc("shm_unmap")
            return {
                "model": model,
                "version": version,
                **_as_workers_report(loaded["reports"]),
                "bytes": sum(report["bytes_read"] for report in loaded["reports"]),
                "seconds": time.perf_counter() - began_s,
                "fingerprint": await asyncio.to_thread(record.keep, fingerprint),
            }

    # --------------------------------------------------------------------------------------------------------

    async def _give_back(self) -> None:
        """Return to the host what a load left free in the allocator: packing for the kernels holds a layer twice and a
        tied head three times, 100 to 400 MB of the measured models, and takes milliseconds to return."""
        if kind_of(self.spec.kind).on_host:
            await self.llm.collective_rpc("shm_give_back")

    def _require(self, state: str, call: str) -> None:
        if self.state != state:
            raise WrongState(f"{call} needs a {state} engine, this one is {self.state}")

    async def _close_adapters(self, version_path: str | None) -> None:
        """Unload all adapters before a load of other weights (None: before the weights are freed)."""
        if self._adapters is None or version_path == self.path:
            return
        try:
            await self._adapters.close(self._limits["adapter_drain_timeout_s"])
        except TimeoutError as error:
            await self.llm.collective_rpc("shm_drop_staged")
            raise WrongState("adapters of the served version still have requests; route them elsewhere") from error

    async def _check(self, path: str) -> dict[str, Any]:
        answers = await self.llm.collective_rpc("shm_check", args=(path,))
        for answer in answers:
            if "refused" in answer:
                name, text = answer["refused"]
                raise BY_NAME.get(name, ServeError)(text)
        await asyncio.to_thread(check_alike, path, answers[0]["alike"])
        return answers[0]

    async def _stage(self, path: str) -> None:
        try:
            await self.llm.collective_rpc("shm_stage", args=(path,))
            while not all(await self.llm.collective_rpc("shm_staged")):
                await asyncio.sleep(STAGE_POLL_S)
        except BaseException:
            await self.llm.collective_rpc("shm_drop_staged")
            raise

    async def _pause(self) -> None:
        # AsyncLLM.pause_generation without its 20 ms sleep, "not required for correctness", which would be most of a
        # small model's pause.
        await self.llm.renderer.clear_mm_cache_async()
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def _load(self, version: str, path: str, *, layerwise: bool = False, wake_kv: bool = False) -> dict[str, Any]:
        update = {"path": path, "layerwise": layerwise}
        return await self.llm.engine_core.call_utility_async(
            "shm_load", version, update, self._prompt, self._pooling_task, wake_kv
        )

    async def _bring_back(self, cause: Exception | None) -> None:
        """Load the served version again in the pause, and resume: after a swap that failed, or before the first that
        vLLM's own reload does, to see that it answers as it did. A new version that has not been loaded before is
        compared with nothing, and a reload that fails without an error would have nonsense for its answer."""
        try:
            loaded = await self._load(self.version, self.path)
            record = self._record_of(self.path)
            record.check(loaded["answer"], "transfer")
            self._note_reload(loaded, record)
        except Exception as error:  # noqa: BLE001 - both versions failed; only a new engine helps
            self.state = "failed"
            failed = f"swap failed ({cause}) and " if cause else ""
            raise _engine_failed(error)(
                f"{failed}{self.path}, served before, cannot be loaded again: {error}"
            ) from error
        if self._adapters is not None:
            self._adapters.serve_on(self.path)
        await self.llm.resume_generation()
        await self.llm.collective_rpc("shm_unmap")

    def _note_reload(self, loaded: dict[str, Any], record: FingerprintRecord) -> None:
        trusted = record.known is not None and record.known.origin == "load"
        self._reloads |= trusted and loaded["reports"][0]["how"] == "layerwise"

    async def _fingerprint(self, origin: str) -> dict[str, Any]:
        answer = await self.llm.engine_core.call_utility_async("shm_run_fingerprint", self._prompt, self._pooling_task)
        record = await asyncio.to_thread(self._record_of, self.path)
        return await asyncio.to_thread(record.keep, record.check(answer, origin))

    def _record_of(self, path: str) -> FingerprintRecord:
        key = version_key(
            path,
            dtype=self.spec.dtype,
            kind=self.spec.kind,
            tensor_parallel=self.spec.tensor_parallel,
            task=self.spec.task,
            rounding=rounding(self.spec.extra_args),
        )
        return self._book.open(key, what=path, tolerance=self._limits["fingerprint_logprob_tolerance"])

    def _rename(self, model: str, version: str, path: str, held: DirectoryLock) -> None:
        """Answer under the new name. Change the list in place, because vLLM's model registry shares it."""
        self._app_state.openai_serving_models.base_model_paths[:] = [BaseModelPath(name=model, model_path=path)]
        for handler in vars(self._app_state)["_state"].values():
            if getattr(handler, "system_fingerprint", None) is not None:
                handler.system_fingerprint = version
        self.model, self.version, self.path, self._lease = model, version, path, held
        if self._adapters is not None:
            self._adapters.serve_on(path)


def _as_workers_report(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """How a load was done, the bytes that each worker read, and the seconds of the slowest."""
    return {
        "how": reports[0]["how"],
        "bytes_read": [report["bytes_read"] for report in reports],
        "load_s": max(report["load_s"] for report in reports),
    }


def _swap_failed(error: Exception) -> type[SwapFailed]:
    return VersionBroken if isinstance(error, NotFinite) else SwapFailed


def _engine_failed(error: Exception) -> type[EngineFailed]:
    """ReloadFailed for what loading into a running engine does each time; not if the engine died of it, memory ran out
    or the version itself is broken."""
    by_chance = isinstance(error, EngineDeadError | NotFinite) or out_of_memory(str(error))
    return EngineFailed if by_chance else ReloadFailed


def _for_rollouts() -> bool:
    return answer_version.owner() == ROLLOUTS
