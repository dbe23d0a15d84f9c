"""Swaps, puts to sleep and wakes one engine from its API process, by the methods behind vLLM's own routes.

Steps of a swap:

    check     configuration, tokenizer and every tensor against the engine, which is not changed yet
    stage     map the new version, and on a GPU lock its pages                      (requests continue)
    pause     hold requests and clear the prefix cache, which the old weights computed
    load      every worker loads its shard (serve.load.loader)
    name      answers name the new version from the next step on
    resume    running requests are recomputed with the new weights and continue
    check     one token against the version's record, in the first step (serve.load.version_check)

Rules
- If a version is refused before the pause, the engine is unchanged. After a failed load or check the weights must not
  be served: on EngineFailed the supervisor ends the engine and a new engine starts.
- One operation at a time (`_lock`); a sleeping engine accepts only `wake`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from runtime.processes.kernel import group_rss_bytes
from serve.core.errors import (
    BY_NAME,
    EngineFailed,
    FingerprintMismatch,
    ReloadFailed,
    ServeError,
    VersionBroken,
    WrongState,
)
from serve.core.model_settings import in_fewer_bits
from serve.core.spec import ReplicaSpec
from serve.engine.start_errors import out_of_memory
from serve.load.shm_source import lease
from serve.load.version_check import Token, check_same_model, check_token, identity, recorded_token
from serve.vllm import answers
from serve.vllm.adapters import EngineAdapters
from weights.memory.locks import DirectoryLock

log = logging.getLogger(__name__)

STAGE_POLL_S = 0.005
DRAIN_GRACE_S = 2.0
FIRST = -(1 << 31)
"""Priority of the fingerprint's request: before all others."""
MOST_LIKELY = 5
"""Number of most likely tokens to read, because rounding can reorder near ties."""
UNRECORDED = (0, 1)
"""Prompt for versions without a record."""


class EngineControl:
    """Owns the engine's state (`ready`, `asleep` or `failed`) and its served version."""

    def __init__(self, llm: AsyncLLM, app_state: Any, spec: ReplicaSpec, limits: dict[str, float], group: int):
        self.llm, self.spec = llm, spec
        self.model, self.version, self.path = spec.model, spec.version, spec.version_path
        self.state = "ready"
        self._app_state, self._limits, self._group = app_state, limits, group
        self._identity = identity(spec.version_path)
        # the lease held on the served version, because the store reuses the files of evicted versions
        self._lease: DirectoryLock | None = lease(spec.version_path)
        self._lock = asyncio.Lock()
        self.adapters = EngineAdapters(llm, app_state.openai_serving_models, spec, limits)
        self.adapters.serve_on(self.path)

    # -- calls over the lifeline --------------------------------------------------------------------------------

    async def started(self) -> dict[str, Any]:
        """Check the version's recorded token before the engine serves requests."""
        return await (await self._ask_token(self.path))

    async def status(self) -> dict[str, Any]:
        """Return state, version, memory in bytes (a shared page counts in equal parts for its users), and the number of
        `running` requests and of requests `waiting` for the engine to wake."""
        requests = self.llm.output_processor.get_num_unfinished_requests()
        return {
            "state": "dead" if self.llm.errored else self.state,
            "model": self.model,
            "version": self.version,
            "rss_bytes": await asyncio.to_thread(group_rss_bytes, self._group),
            "running": 0 if self.state == "asleep" else requests,
            "waiting": requests if self.state == "asleep" else 0,
        }

    async def pulse(self) -> None:
        """Return once the core answers; it answers between two steps and while asleep."""
        await self.llm.is_paused()

    async def swap(self, model: str, version: str, version_path: str) -> dict[str, Any]:
        """Serve another version of the same architecture under the name `model`.

        Returns total `seconds`, `pause_s` (while no step ran), `load_s` of the slowest worker, the version's `bytes`,
        each worker's `bytes_read`, `how` the version was loaded, and the verdict on its `fingerprint`. Raises
        WrongState or VersionError (engine unchanged), or EngineFailed (kill the engine).
        """
        async with self._lock:
            self._require("ready", "swap")
            began_s = time.perf_counter()
            held, nbytes = await self._check(version_path)
            if version_path != self.path:
                await self.adapters.close()
            try:
                await self._stage(version_path)
            except BaseException:
                self.adapters.serve_on(self.path)
                raise
            try:
                await self._pause()
                paused_s = time.perf_counter()
                report = await self._load(model, version, version_path, held)
                token = await self._ask_token(version_path)  # queued before all other requests
                await self.llm.resume_generation()
                pause_s = time.perf_counter() - paused_s
                verdict = await token
            except Exception as error:  # noqa: BLE001 - whatever failed, the weights are not to be served
                raise self._failed(version_path, error) from error
            await self._unmap()
            seconds = time.perf_counter() - began_s
            done = {"bytes": nbytes, "seconds": seconds, "pause_s": pause_s, "fingerprint": verdict}
            return {"model": model, "version": version, **report, **done}

    async def sleep(self) -> dict[str, Any]:
        """Free weights and KV memory; if the engine can load no other version, move the weights to host memory instead.
        Drain the engine first: raises WrongState if requests remain after a grace period. Raises EngineFailed (kill the
        engine) if vLLM fails, since its scheduler is then paused and its memory partly released."""
        async with self._lock:
            self._require("ready", "sleep")
            await self._drained()
            began_s = time.perf_counter()
            await self.adapters.close()
            refusal = (await self.llm.collective_rpc("shm_refusal"))[0]
            try:
                # "keep": requests that arrive after the check are not aborted; vLLM runs them after the wake.
                await self.llm.sleep(level=1 if refusal else 2, mode="keep")
            except Exception as error:  # noqa: BLE001 - how much is released is unknown
                self.state = "failed"
                raise EngineFailed(f"the engine failed to sleep: {error}") from error
            self.state, self._lease = "asleep", None
            return {"seconds": time.perf_counter() - began_s}

    async def wake(self, model: str, version: str, version_path: str) -> dict[str, Any]:
        """Wake with the weights of `version_path`; if the sleep freed the weights, this may be another version than
        before. Raises WrongState or VersionError (engine unchanged), or EngineFailed (kill the engine)."""
        async with self._lock:
            self._require("asleep", "wake")
            began_s = time.perf_counter()
            kept = version_path == self.path and bool((await self.llm.collective_rpc("shm_refusal"))[0])
            held = lease(version_path) if kept else (await self._check(version_path))[0]
            try:
                if kept:
                    report: dict[str, Any] = {"how": "kept", "bytes_read": [0], "load_s": 0.0}
                    self._rename(model, version, version_path, held)
                    token = await self._ask_token(version_path)
                    await self.llm.wake_up()
                else:
                    await self.llm.wake_up(["weights"])
                    report = await self._load(model, version, version_path, held)
                    token = await self._ask_token(version_path)  # the check's request runs before all waiting requests
                    await self.llm.wake_up(["kv_cache"])  # this call also resumes scheduling
                verdict = await token
            except Exception as error:  # noqa: BLE001 - whatever failed, the weights are not to be served
                raise self._failed(version_path, error) from error
            self.state = "ready"
            await self._unmap()
            done = {"bytes": sum(report["bytes_read"]), "seconds": time.perf_counter() - began_s}
            return {"model": model, "version": version, **report, **done, "fingerprint": verdict}

    # --------------------------------------------------------------------------------------------------------

    def _require(self, state: str, call: str) -> None:
        if self.state != state:
            raise WrongState(f"{call} needs a {state} engine, but this engine is {self.state}")

    async def _drained(self) -> None:
        """Wait until no request is left: vLLM's engine dies if it sleeps with decodes in flight (vllm#45520)."""
        deadline_s = time.perf_counter() + DRAIN_GRACE_S
        processor = self.llm.output_processor
        while unfinished := processor.get_num_unfinished_requests() + answers.unbegun():
            if time.perf_counter() > deadline_s:
                raise WrongState(f"engine still has {unfinished} requests; drain it before sleep")
            await asyncio.sleep(0.01)

    async def _check(self, path: str) -> tuple[DirectoryLock, int]:
        """Lease a version that the engine can load; return the lease and the version's bytes. Raises VersionError."""
        await asyncio.to_thread(check_same_model, self._identity, path)
        held = lease(path)
        await asyncio.to_thread(recorded_token, path)
        answers = await self.llm.collective_rpc("shm_check", args=(path,))
        for answer in answers:
            if "refused" in answer:
                name, text = answer["refused"]
                raise BY_NAME.get(name, ServeError)(text)
        return held, answers[0]["bytes"]

    async def _stage(self, path: str) -> None:
        try:
            await self.llm.collective_rpc("shm_stage", args=(path,))
            while not all(await self.llm.collective_rpc("shm_staged")):
                await asyncio.sleep(STAGE_POLL_S)
        except BaseException:
            await self._unmap()
            raise

    async def _unmap(self) -> None:
        try:
            await self.llm.collective_rpc("shm_unmap")
        except Exception as error:  # noqa: BLE001 - the version is served all the same
            log.error("could not unmap a loaded version: %s", error)

    async def _pause(self) -> None:
        # Same as AsyncLLM.pause_generation, but without its 20 ms sleep ("not required for correctness"), which would
        # take most of a small model's pause.
        await self.llm.renderer.clear_mm_cache_async()
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def _load(self, model: str, version: str, path: str, held: DirectoryLock) -> dict[str, Any]:
        """Load the version into the paused engine. Returns how, bytes by worker, and the slowest worker's seconds."""
        reports = await self.llm.collective_rpc("shm_load", args=(path,))
        self._rename(model, version, path, held)
        return {
            "how": reports[0]["how"],
            "bytes_read": [report["bytes_read"] for report in reports],
            "load_s": max(report["load_s"] for report in reports),
        }

    def _failed(self, path: str, error: Exception) -> EngineFailed:
        """Return ReloadFailed if the load would fail in other running engines too; another error if the engine died,
        memory ran out, the version itself is broken or a token differed."""
        self.state = "failed"
        problem = f"{path} failed to load: {error}"
        if isinstance(error, VersionBroken):
            return VersionBroken(problem)
        by_chance = isinstance(error, EngineDeadError | FingerprintMismatch) or out_of_memory(str(error))
        return EngineFailed(problem) if by_chance else ReloadFailed(problem)

    async def _ask_token(self, path: str) -> Coroutine[Any, Any, dict[str, Any]]:
        """Request the token after the recorded prompt; awaiting the result compares the token with the record."""
        # a version quantised at loading answers otherwise than recorded
        record = None if in_fewer_bits(self.spec.extra_args) else await asyncio.to_thread(recorded_token, path)
        params: SamplingParams | PoolingParams
        if self.spec.task == "embed":
            params, record = PoolingParams(task="embed"), None
        else:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MOST_LIKELY, detokenize=False)
        prompt = {"prompt_token_ids": list(record.prompt if record else UNRECORDED)}
        output = await self.llm.add_request(f"fingerprint-{uuid.uuid4().hex}", prompt, params, priority=FIRST)
        return self._checked(path, record, output)

    async def _checked(self, path: str, record: Token | None, output: RequestOutputCollector) -> dict[str, Any]:
        ended: Any = await output.get()
        if self.spec.task == "embed":
            answer = dict(enumerate(ended.outputs.data.float().flatten().tolist()))
        else:
            answer = {token: entry.logprob for token, entry in ended.outputs[0].logprobs[0].items()}
        return check_token(answer, record, tolerance=self._limits["fingerprint_logprob_tolerance"], version=path)

    def _rename(self, model: str, version: str, path: str, held: DirectoryLock) -> None:
        """Answer under the new model name. Changes the list in place, because vLLM's model registry shares the list."""
        self._app_state.openai_serving_models.base_model_paths[:] = [BaseModelPath(name=model, model_path=path)]
        for handler in vars(self._app_state)["_state"].values():
            if getattr(handler, "system_fingerprint", None) is not None:
                handler.system_fingerprint = version
        self.model, self.version, self.path, self._lease = model, version, path, held
        self.adapters.serve_on(path)
