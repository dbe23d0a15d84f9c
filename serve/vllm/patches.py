"""Everything this project changes inside vLLM 0.32, in one place, each with its reason.

Applied once in the forked engine process, before its engine core is forked from it; the core and its workers
inherit the patched modules. Written against the pinned version; tests/e2e/test_engine_contract.py fails when
an upgrade moves what is touched here.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor import multiproc_executor
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager, backend_outlines

from runtime import numa
from runtime.devices.kinds import kind_of
from runtime.processes.kernel import die_with_parent
from serve.cpu import gloo_device
from serve.cpu.finishing_scheduler import FinishingScheduler
from serve.cpu.lora import GroupedLoRA
from serve.vllm import answer_version, forced_calls, grammar_threads, stream_chunks
from serve.vllm.fingerprint_pass import run_fingerprint

SEGMENT_NAME_BYTES = 8
_applied: list[bool] = []


def apply(kind: str, *, eager: bool, segment_prefix: str, numa_nodes: Sequence[int | None] = ()) -> None:
    """Idempotent. `kind` of device; `eager`: the engine runs without compiled graphs; `numa_nodes`: of the device
    of each worker."""
    if _applied:
        return
    _applied.append(True)

    # vLLM spawns its processes on the CPU platform and wherever it suspects threads, and so imports itself anew in
    # each (12 s). This process was forked from a parent without threads or CUDA: forking again is sound.
    engine_utils.get_mp_context = _fork_context
    multiproc_executor.get_mp_context = _fork_context

    # A killed API process leaves vLLM's engine core running with the devices' memory until it next uses its socket.
    worker = multiproc_executor.WorkerProc
    EngineCoreProc.run_engine_core = staticmethod(_dies_with_parent(EngineCoreProc.run_engine_core))
    # All of a tensor-parallel engine runs beside its devices (runtime.numa); a worker beside its own one. vLLM's own
    # --numa-bind starts processes through numactl, where these are forked.
    worker.worker_main = staticmethod(_dies_with_parent(_beside(numa_nodes, worker.worker_main)))

    # What went wrong in the core or a worker reaches the frontend as "Engine core initialization failed" only.
    EngineCoreProc.__init__ = _leaves_word(EngineCoreProc.__init__)
    worker.__init__ = _leaves_word(worker.__init__)

    # A paused scheduler runs no fingerprint request, while resuming it would run the held requests too. And
    # `wake_up(["kv_cache"])` resumes scheduling at once, so requests queued during the sleep would be answered by
    # weights whose fingerprint nobody has looked at.
    EngineCore.shm_run_fingerprint = run_fingerprint
    # The frontend counts requests but does not know which of them the scheduler holds back.
    EngineCore.shm_request_counts = _request_counts
    # One message instead of six between frontend and core, each of which would wait its turn during the pause.
    EngineCore.shm_load = _load
    # Pause, exchange and resume of a staged version, whose fingerprint has answered already, as one message.
    EngineCore.shm_exchange = _exchange
    # Requests that finish on the version before a staged swap: told when there are none left, moved, and done with.
    EngineCore.shm_finished = lambda core: core.scheduler.finished()
    EngineCore.shm_move_finishing = _move_finishing
    EngineCore.shm_end_finishing = _end_finishing

    # Tensor-parallel workers talk through segments in /dev/shm that only an orderly exit removes. With names of our
    # own the supervisor can remove them after any death.
    shared_memory._SHM_NAME_PREFIX = f"/{segment_prefix}"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(segment_prefix) + 1 + 2 * SEGMENT_NAME_BYTES
    multiproc_executor.get_file_store_init_method = functools.partial(_rendezvous_file, segment_prefix)

    # An answer names the version that computed it.
    answer_version.apply()
    StructuredOutputManager.__init__ = _then(StructuredOutputManager.__init__, grammar_threads.give_way)
    grammar_threads.no_outlines(backend_outlines)
    forced_calls.apply()
    # A stream's chunks have OpenAI's fields, and vLLM's own only where they say something.
    stream_chunks.apply()

    # Loads of adapters happen inside a step, unseen: nothing in vLLM counts or times them.
    LRUCacheWorkerLoRAManager.shm_loads, LRUCacheWorkerLoRAManager.shm_load_s = 0, 0.0
    LRUCacheWorkerLoRAManager._load_adapter = _counted(LRUCacheWorkerLoRAManager._load_adapter)

    if not kind_of(kind).on_host:
        # Compiled graphs are kept by a hash that the model's path is part of. Every version has a path of its own, so
        # each new one would be compiled again, for half a minute and more, into the very same code.
        ModelConfig.compute_hash = _of_any_path(ModelConfig.compute_hash)
    else:
        # vLLM hashes prompts beside the steps and labels a step's outputs with the newest version. Here a prompt's hash
        # belongs to a version, and steps may be computed by the one before (serve.cpu.finishing_scheduler).
        EngineCore.preprocess_add_request = _salted(EngineCore.preprocess_add_request)
        EngineCore._attach_weight_version = _attach_weight_version
        punica_cpu.PunicaWrapperCPU = GroupedLoRA
        gloo_device.apply()
        # vLLM looks at an unknown architecture in a subprocess, lest the look initialise CUDA: 10 s of imports
        # that this process has behind it.
        _LazyRegisteredModel.inspect_model_cls = _inspect_here
        if eager:
            # Small helpers (rank of a log-probability, vocabulary masks) are torch.compiled even in eager mode, and
            # the first request that reaches one waits for a C++ compiler: 3 s warm, 30 s cold.
            torch.compiler.set_stance("force_eager")


def _then(made: Callable[..., None], after: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        after(self)

    return init


def _of_any_path(compute_hash):
    @functools.wraps(compute_hash)
    def run(config: ModelConfig) -> str:
        path, config.model = config.model, ""
        try:
            return compute_hash(config)
        finally:
            config.model = path

    return run


def _counted(load):
    @functools.wraps(load)
    def run(manager: LRUCacheWorkerLoRAManager, request: Any):
        began_s = time.perf_counter()
        loaded = load(manager, request)
        manager.shm_loads += 1
        manager.shm_load_s += time.perf_counter() - began_s
        return loaded

    return run


def _inspect_here(model: _LazyRegisteredModel) -> _ModelInfo:
    return _ModelInfo.from_model_cls(model.load_model_cls())


def _fork_context() -> multiprocessing.context.BaseContext:
    return multiprocessing.get_context("fork")


def _dies_with_parent(function):
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any):
        die_with_parent()
        return function(*args, **kwargs)

    return run


def _beside(numa_nodes: Sequence[int | None], worker_main):
    @functools.wraps(worker_main)
    def run(*args: Any, **kwargs: Any):
        numa.bind(numa_nodes[kwargs["local_rank"] :][:1])
        return worker_main(*args, **kwargs)

    return run


def _rendezvous_file(segment_prefix: str) -> str:
    # vLLM's CPU collectives name their segments by the base name of this file.
    return f"file://{tempfile.gettempdir()}/{segment_prefix}{uuid.uuid4().hex}"


def first_failure() -> str | None:
    """What the first failing process of this engine said, None if none did."""
    try:
        return _failure_note().read_text()
    except FileNotFoundError:
        return None


def _failure_note() -> Path:
    return Path(tempfile.gettempdir()) / "failure"


def _leaves_word(constructor):
    @functools.wraps(constructor)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            constructor(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(FileExistsError), open(_failure_note(), "x") as note:
                note.write(f"{type(error).__name__}: {error}")
            raise

    return run


def _request_counts(core: EngineCore) -> tuple[int, int, int]:
    """Requests running, those held back, and those of both that finish on the version before."""
    scheduler = core.scheduler
    finishing = scheduler.finishing() if isinstance(scheduler, FinishingScheduler) else 0
    return *scheduler.get_request_counts(), finishing


def _load(
    core: EngineCore, version: str, update: dict[str, Any], prompt: list[int], pooling_task: str | None, wake_kv: bool
) -> dict[str, Any]:
    """vLLM's weight-transfer sequence (AsyncLLM.start_weight_update, update_weights, finish_weight_update), then the
    fingerprint, if it was not computed during the load. With `wake_kv` a sleeping engine's KV cache comes back in
    between, without its resume_scheduler."""
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights", kwargs={"update_info": update})
    core.collective_rpc("finish_weight_update")
    core.set_weight_version(version)
    reports = core.collective_rpc("shm_report")
    if wake_kv:
        core.model_executor.wake_up(["kv_cache"])
    answer, fingerprint_s = reports[0].pop("answer", None), 0.0
    if answer is None:
        began_s = time.perf_counter()
        answer = run_fingerprint(core, prompt, pooling_task)
        fingerprint_s = time.perf_counter() - began_s
    return {"reports": reports, "answer": answer, "fingerprint_s": fingerprint_s}


def _exchange(core: EngineCore, version: str, update: dict[str, Any]) -> Future | dict[str, Any]:
    """Put a staged and proven version in the place of the serving one between two steps of the engine.

    The requests it has finish on the version before, where the scheduler can leave them there; else they compute their
    past again. After an error the engine stays paused, its caches cleared, for a whole load to follow. Resolves to the
    workers' `reports`, `finishing` (how many requests keep the version before) and `pause_s` from the moment no step is
    under way to the moment the next may begin.
    """
    keep = core.scheduler.can_finish() and bool(core.scheduler.requests)

    def exchange() -> dict[str, Any]:
        before = core.get_weight_version()
        try:
            core.collective_rpc("start_weight_update")
            core.collective_rpc("update_weights", kwargs={"update_info": update})
            core.collective_rpc("finish_weight_update")
            reports = core.collective_rpc("shm_report")
            core.set_weight_version(version)
            finishing = core.scheduler.flip(before) if keep else 0
        except Exception:
            core._reset_caches()
            raise
        core.resume_scheduler()
        return {"reports": reports, "finishing": finishing, "pause_s": time.perf_counter() - began_s}

    began_s = time.perf_counter()
    return _between_steps(core, exchange, clear_cache=not keep)


def _move_finishing(core: EngineCore) -> Future | int:
    """Let the requests that finish on the version before go on with the newest one; resolves to their number."""

    def move() -> int:
        moved = core.scheduler.move()
        core.resume_scheduler()
        return moved

    return _between_steps(core, move, clear_cache=False)


def _end_finishing(core: EngineCore, give_back: bool) -> None:
    """Free the version before. With `give_back` its memory goes to the host at once; else the allocator keeps it, for
    the next version or until the engine sleeps, because giving gigabytes back would hold up a step."""
    core.collective_rpc("shm_release_retired")
    core.scheduler.end()
    if give_back:
        core.collective_rpc("shm_give_back")


def _between_steps(core: EngineCore, action: Callable[[], Any], *, clear_cache: bool) -> Any:
    """Pause, act once no step is under way, and return what `action` does, or a Future of it."""
    paused = core.pause_scheduler("keep", clear_cache=clear_cache)
    if paused is None:
        return action()
    done: Future[Any] = Future()

    def act(paused: Future) -> None:
        try:
            paused.result()
            done.set_result(action())
        except Exception as error:  # noqa: BLE001 - carried to the frontend by the future
            done.set_exception(error)

    paused.add_done_callback(act)
    return done


def _salted(preprocess):
    @functools.wraps(preprocess)
    def run(core: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        salt = core.scheduler.salt
        if salt:
            request.cache_salt = salt + (request.cache_salt or "")
        made, wave = preprocess(core, request)
        made.shm_salt = salt
        return made, wave

    return run


def _attach_weight_version(core: EngineCore, outputs: dict[int, EngineCoreOutputs]) -> None:
    version = core.scheduler.answering(core.get_weight_version())
    for output in outputs.values():
        output.weight_version = version
