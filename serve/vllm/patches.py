"""Applies every change this project makes inside vLLM 0.32, each with its reason.

The forked engine process applies them once, before it forks its engine core; the core and its workers inherit the
patched modules. Written against the pinned version; tests/e2e/test_engine_contract.py fails if an upgrade moves patched
code.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pkgutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import shared_memory
from typing import Any

import torch
import xgrammar
from vllm.config import ModelConfig
from vllm.lora.layers import base_linear
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.incremental_lexer import IncrementalLexer
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.renderers.base import BaseRenderer
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.jamba_tool_parser import JambaToolParser
from vllm.tool_parsers.phi4mini_tool_parser import Phi4MiniJsonToolParser
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor import multiproc_executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output import StructuredOutputManager, backend_guidance, backend_outlines, backend_xgrammar
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import kind_of
from runtime.processes import numa
from runtime.processes.kernel import die_with_parent
from serve.api import (
    adapter_steps,
    answer_shapes,
    answer_version,
    embedding_requests,
    fair_order,
    legacy_functions,
    request_faults,
    stream_chunks,
    unfit_requests,
)
from serve.cpu.lora import GroupedLoRA
from serve.forms import form_backends, grammar_threads, impossible_forms, schema_backend
from serve.vllm import deaths
from serve.vllm.fairness import owner_places, request_bounds, step_bounds
from serve.vllm.fingerprint_pass import run_fingerprint

log = logging.getLogger(__name__)

SEGMENT_NAME_BYTES = 8
LATE_REPLY_S = 10.0
"""How long the other workers have to reply once one has failed; they may be waiting for it in a collective for ever."""
OUT_OF_STEP = 70
"""Exit code of a worker that failed in a step to which another one replies."""
OWED = "shm_owed"
"""Attribute of a worker's queue: the number of replies to come that nobody waits for any more."""
FP8_FROM = DeviceCapability(8, 9)
"""Triton's kernels compute in FP8 from Ada on."""
_applied: list[bool] = []


def apply(
    kind: str,
    *,
    eager: bool,
    segment_prefix: str,
    core_death: deaths.CoreDeath,
    numa_nodes: Sequence[int | None] = (),
) -> None:
    """Idempotent. `kind`: of device; `eager`: the engine runs without compiled graphs; `core_death`: is to follow the
    core; `numa_nodes`: that of each worker's device."""
    if _applied:
        return
    _applied.append(True)
    _patch_processes(segment_prefix, core_death, numa_nodes)
    _patch_core()
    answer_shapes.apply()
    # An answer names the version that computed it.
    answer_version.apply()
    # In this order: what reads requests wraps what bounds them.
    _bound_requests()
    _patch_requests()
    _patch_adapters()
    if kind_of(kind).on_host:
        _patch_on_host(kind, eager)
    else:
        _patch_on_device(kind)


def _patch_processes(segment_prefix: str, core_death: deaths.CoreDeath, numa_nodes: Sequence[int | None]) -> None:
    """How the frontend, the core and its workers start, end, and hear of each other's errors."""
    # vLLM spawns its processes on the CPU (vllm/platforms/cpu.py): each would import itself again (12 s), without these
    # patches. This process was forked from a parent without threads or CUDA, so forking again is safe.
    engine_utils.get_mp_context = _fork_context
    multiproc_executor.get_mp_context = _fork_context

    # A process learns that its child ended by a pipe that the child's own children hold too: workers that outlive their
    # core would hide its end, and a start would wait for it.
    worker = multiproc_executor.WorkerProc
    EngineCoreProc.run_engine_core = staticmethod(_dies_with_parent(EngineCoreProc.run_engine_core))
    # A tensor-parallel engine runs on the NUMA nodes of its devices (runtime.processes.numa), each worker on its own
    # device's node. vLLM's --numa-bind starts processes through numactl, but these are forked.
    worker.worker_main = staticmethod(_dies_with_parent(_beside(numa_nodes, worker.worker_main)))

    # A call that fails on several workers raises at the first reply, and the other replies stay in their queues: each
    # later call takes them for its own. The load that brings an old version back then failed at once, and a sleep ended
    # while a worker was still awake.
    executor = multiproc_executor.MultiprocExecutor
    executor.collective_rpc = with_every_reply(executor.collective_rpc)

    # Only one worker replies to a step, and vLLM just logged the error of another one: the one that replies waited for
    # it in a collective, until vLLM gave up after five minutes. Now a worker with an error exits, which is noticed at
    # once.
    worker._execute_worker_rpc = ends_out_of_step(worker._execute_worker_rpc)

    # vLLM reports any error of the core or a worker to the frontend only as "Engine core initialization failed".
    EngineCoreProc.__init__ = deaths.leaves_word(EngineCoreProc.__init__)
    worker.__init__ = deaths.leaves_word(worker.__init__)

    # vLLM's monitor of workers begins after some of the start, and a call of all workers waits on for a dead one.
    worker.wait_for_ready = staticmethod(deaths.follow_workers(worker.wait_for_ready))
    executor.start_worker_monitor = lambda self, inline=False: None
    core_death.follow(engine_utils.CoreEngineProcManager)

    # Tensor-parallel workers communicate through segments in /dev/shm that only an orderly exit removes. Names chosen
    # here let the supervisor remove them after a crash.
    shared_memory._SHM_NAME_PREFIX = f"/{segment_prefix}"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(segment_prefix) + 1 + 2 * SEGMENT_NAME_BYTES
    multiproc_executor.get_file_store_init_method = functools.partial(_rendezvous_file, segment_prefix)


def _patch_core() -> None:
    """Calls of the frontend to the core that vLLM lacks."""
    # A paused scheduler runs no fingerprint request, and resuming it would also run the held requests. And
    # `wake_up(["kv_cache"])` resumes scheduling at once, so weights with an unchecked fingerprint would answer requests
    # queued during the sleep.
    EngineCore.shm_run_fingerprint = run_fingerprint
    # The frontend counts requests but does not know which ones the scheduler holds back.
    EngineCore.shm_request_counts = _request_counts
    # One message between frontend and core instead of six, each of which would wait in the queue during the pause.
    EngineCore.shm_load = _load


def _bound_requests() -> None:
    """What keeps one request, or one owner, from slowing an engine's steps or its frontend's loop for all others."""
    StructuredOutputManager.__init__ = _then(StructuredOutputManager.__init__, grammar_threads.give_way)
    grammar_threads.no_outlines(backend_outlines)
    schema_backend.apply(backend_xgrammar, backend_guidance)
    form_backends.apply(StructuredOutputManager)
    form_backends.lock_no_masks(backend_guidance.GuidanceBackend)
    form_backends.masks_of_the_model(backend_guidance.GuidanceGrammar)
    step_bounds.bound_whitespace(xgrammar.GrammarCompiler)
    step_bounds.bound_time(backend_xgrammar.XgrammarGrammar)
    step_bounds.bound_time(backend_guidance.GuidanceGrammar)
    step_bounds.slice_prompt_logprobs(GPUModelRunner)
    step_bounds.bound_unread(RequestOutputCollector)
    step_bounds.bound_reading(DelegatingParser)
    step_bounds.bound_pieces(IncrementalLexer)
    step_bounds.bound_unended(Phi4MiniJsonToolParser, "]")
    step_bounds.bound_unended(JambaToolParser, "</tool_calls>")
    step_bounds.bound_without_text(FastIncrementalDetokenizer, SlowIncrementalDetokenizer)
    step_bounds.bound_search(ThinkingBudgetStateHolder)
    request_bounds.bound_forbidden(SamplingParams)
    request_bounds.bound_tokens(BaseRenderer)
    request_bounds.cut_texts(TokenizeParams)
    request_bounds.forbid_known(InputProcessor)
    request_bounds.keep_seeds(ParentRequest)
    impossible_forms.apply()
    # Owners take turns in an engine's queue, and nobody has all of its places.
    fair_order.apply()
    owner_places.apply()
    # After it: room is made for what the step may load alone.
    adapter_steps.apply()
    unfit_requests.apply()


def _patch_requests() -> None:
    """How requests are read, and answers written in their form; the modules say why."""
    request_faults.apply()
    # Answers have tools in the newer form alone.
    legacy_functions.apply()
    embedding_requests.apply()
    # A stream's chunks have OpenAI's fields, and vLLM's own only where they say something.
    stream_chunks.apply()


def _patch_adapters() -> None:
    PrometheusStatLogger.__init__ = _then(PrometheusStatLogger.__init__, no_series_of_adapters)


def _patch_on_device(kind: str) -> None:
    """kind: of device, on which torch computes and which has memory of its own."""
    # vLLM caches compiled graphs by a hash that includes the model's path. Every version has its own path, so vLLM
    # would compile each new one again, for 30 s and more, into the same code.
    ModelConfig.compute_hash = _of_any_path(ModelConfig.compute_hash)
    # The warm parent's imports may have asked about its first GPU, and this engine's may be another kind.
    forget_devices(type(current_platform))
    if kind_of(kind).compiled_attention:
        prefer_ready_made(type(current_platform), kind_of(kind))
    # The front end imports classes of models too, and the core that it then forks has to find the devices unused.
    load = _LazyRegisteredModel.load_model_cls
    _LazyRegisteredModel.load_model_cls = with_device_at_import(load, current_platform, kind_of(kind))


def _patch_on_host(kind: str, eager: bool) -> None:
    punica_cpu.PunicaWrapperCPU = GroupedLoRA
    # vLLM asks a layer's weight where it lies, and the CPU's int8 kernel (compressed-tensors W8A8) has packed it
    # away by then.
    host = torch.device(kind_of(kind).torch_type)
    base_linear._get_lora_device = lambda layer: host
    # vLLM inspects an unknown architecture in a subprocess so as not to initialise CUDA: 10 s of imports that this
    # process has already done.
    _LazyRegisteredModel.inspect_model_cls = _inspect_here
    if eager:
        # vLLM applies torch.compile to small helpers (rank of a log-probability, vocabulary masks) even in eager
        # mode, and the first request that reaches one waits for a C++ compiler: 3 s warm, 30 s cold.
        torch.compiler.set_stance("force_eager")


def _then(made: Callable[..., None], after: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        after(self)

    return init


def no_series_of_adapters(logger: Any) -> None:
    """logger: vllm.v1.metrics.loggers.PrometheusStatLogger. It keeps a series for each order in which adapters were
    asked for: of 20 of one owner 93,000 took 112 MiB, and each scrape held the loop that sends tokens for 2.6 s."""
    logger.gauge_lora_info = None


def forget_devices(platform: type) -> None:
    """Clear the device properties that a vLLM platform class has cached (vllm/platforms/cuda.py,
    get_device_capability)."""
    for owner in platform.__mro__:
        for method in vars(owner).values():
            clear = getattr(getattr(method, "__func__", method), "cache_clear", None)
            if clear is not None:
                clear()


def with_device_at_import(load: Callable[[Any], type], platform: Any, kind: DeviceKind) -> Callable[[Any], type]:
    """`load`: imports the class of a model, whose modules may ask what the device is; `platform`: vLLM's, which knows
    without touching it."""

    @functools.wraps(load)
    def run(model: Any) -> type:
        with kind.device_at_import(lambda: (tuple(platform.get_device_capability()), platform.get_device_name())):
            return load(model)

    return run


def prefer_ready_made(platform: Any, kind: DeviceKind) -> None:
    """A platform of vLLM's takes an attention backend that has to be compiled only where no other computes the model,
    or an argument of the engine asks for it.

    Triton's count as valid for keys and values in FP8 on every GPU, but before Ada their layers raise
    (TritonAttentionImpl in vllm/v1/attention/backends/triton_attn.py). There the compiled one is taken if a compiler is
    there; else Triton's, which says what is wrong."""
    every = platform.get_valid_backends.__func__

    @functools.wraps(every)
    def get_valid_backends(cls: Any, device_capability: Any, attn_selector_config: Any, **more: Any) -> Any:
        found, refused = every(cls, device_capability, attn_selector_config, **more)
        ready = [one for one in found if kind.compiled_attention not in one.backend.name]
        if (attn_selector_config.kv_cache_dtype or "").startswith("fp8") and device_capability < FP8_FROM:
            computes = [one for one in ready if not one.backend.name.startswith("TRITON")]
            ready = computes or ([] if pkgutil.resolve_name(kind.has_compiler)() else ready)
        return ready or found, refused

    platform.get_valid_backends = classmethod(get_valid_backends)


def _of_any_path(compute_hash):
    @functools.wraps(compute_hash)
    def run(config: ModelConfig) -> str:
        path, config.model = config.model, ""
        try:
            return compute_hash(config)
        finally:
            config.model = path

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


def with_every_reply(rpc):
    """rpc: vLLM's MultiprocExecutor.collective_rpc, a call of every worker."""

    @functools.wraps(rpc)
    def run(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **aggregators: Any,
    ) -> Any:
        if non_block or unique_reply_rank is not None:
            return rpc(self, method, timeout, args, kwargs, non_block, unique_reply_rank, **aggregators)
        asked = rpc(self, method, timeout, args, kwargs, True, **aggregators)
        asked.get_response = functools.partial(_replies, self.response_mqs, method, timeout)
        return asked.result()

    return run


def _replies(queues: Sequence[Any], method: Any, timeout_s: float | None) -> list[Any]:
    """One reply of each worker. Discards replies that an earlier call did not wait for: they come first in the queues.
    Raises RuntimeError with the first failure, TimeoutError."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    found: list[Any] = []
    failed: RuntimeError | None = None
    late = False
    for queue in queues:
        owed = vars(queue).setdefault(OWED, 0) + 1
        try:
            while owed:
                wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                status, result = queue.dequeue(timeout=wait_s)
                owed -= 1
        except TimeoutError:
            late = True
            continue
        finally:
            setattr(queue, OWED, owed)
        found.append(result)
        if status != multiproc_executor.WorkerProc.ResponseStatus.SUCCESS and failed is None:
            failed = RuntimeError(f"Worker failed with error '{result}'; the stack trace is in the engine's log")
            until_s = min(filter(None, (until_s, time.monotonic() + LATE_REPLY_S)))
    if failed is not None:
        raise failed
    if late:
        raise TimeoutError(f"RPC call to {method} timed out.")
    return found


def ends_out_of_step(execute):
    """execute: vLLM's WorkerProc._execute_worker_rpc, one call of a worker."""

    @functools.wraps(execute)
    def run(self: Any, request: tuple[Any, tuple[Any, ...], dict[str, Any], int | None]) -> None:
        method, args, kwargs, output_rank = request
        if output_rank in (None, self.rank) or not isinstance(method, str):
            return execute(self, request)
        try:
            getattr(self.worker, method)(*args, **kwargs)
        except Exception as error:
            log.exception("worker %d fails in %s (%s), and ends: others would wait for it", self.rank, method, error)
            logging.shutdown()
            os._exit(OUT_OF_STEP)  # an orderly end would wait for the others too

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


def _request_counts(core: EngineCore) -> tuple[int, int]:
    """Return the numbers of running and of held-back requests."""
    running, waiting = core.scheduler.get_request_counts()
    return running, waiting


def _load(
    core: EngineCore, version: str, update: dict[str, Any], prompt: list[int], pooling_task: str | None, wake_kv: bool
) -> dict[str, Any]:
    """Run vLLM's weight-transfer sequence (AsyncLLM.start_weight_update, update_weights, finish_weight_update), then
    the fingerprint. With `wake_kv` a sleeping engine's KV cache wakes in between, without its resume_scheduler."""
    _transfer(core, update)
    core.set_weight_version(version)
    reports = core.collective_rpc("shm_report")
    if wake_kv:
        core.model_executor.wake_up(["kv_cache"])
        core.collective_rpc("shm_woken")
    began_s = time.perf_counter()
    answer = run_fingerprint(core, prompt, pooling_task)
    return {"reports": reports, "answer": answer, "fingerprint_s": time.perf_counter() - began_s}


def _transfer(core: EngineCore, update: dict[str, Any]) -> None:
    """Transfer on every worker. After a failure it ends the transfer of the workers that did not fail, because vLLM
    refuses to begin another one in its midst (start_weight_update in vllm/v1/worker/gpu_worker.py)."""
    try:
        core.collective_rpc("start_weight_update")
        core.collective_rpc("update_weights", kwargs={"update_info": update})
        core.collective_rpc("finish_weight_update")
    except Exception:
        core.collective_rpc("shm_leave_update")
        raise
