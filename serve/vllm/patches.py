"""Applies every change this project makes inside vLLM 0.32, each with its reason and what would remove it.

The forked engine process applies them once, before it forks its engine core; the core and its workers inherit the
patched modules. Written against the pinned version; tests/e2e/test_engine_contract.py fails if an upgrade moves patched
code.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import shared_memory
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.lora.layers import base_linear
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.platforms import current_platform
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import multiproc_executor
from vllm.v1.structured_output import backend_guidance, backend_xgrammar

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import kind_of
from serve.api import answer_shapes, answer_version, request_faults
from serve.forms import grammars
from serve.vllm import deaths, request_bounds
from serve.vllm.cpu_lora import GroupedLoRA

log = logging.getLogger(__name__)

SEGMENT_NAME_BYTES = 8
LATE_REPLY_S = 10.0
"""How long the other workers have to reply once one has failed."""
OUT_OF_STEP = 70
"""Exit code of a worker, or of the core, where a worker has failed and another one would wait for it for ever."""
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
    core; `numa_nodes`: of each worker's device."""
    if _applied:
        return
    _applied.append(True)
    _patch_processes(segment_prefix, core_death, numa_nodes)
    answer_shapes.apply()
    # An answer names the version that computed it.
    answer_version.apply()
    # A request that vLLM cannot read is the request's fault.
    request_faults.apply()
    _bound_requests()
    if kind_of(kind).on_host:
        _patch_on_host(kind, eager)
    else:
        _patch_on_device(kind)


def _patch_processes(segment_prefix: str, core_death: deaths.CoreDeath, numa_nodes: Sequence[int | None]) -> None:
    """How the frontend, the core and its workers start, end, and hear of each other's errors."""
    # vLLM spawns its processes on the CPU (vllm/platforms/cpu.py): each would import itself again (12 s). This process
    # was forked from a parent without threads or CUDA, so forking again is safe. Removed by: an option for the method.
    engine_utils.get_mp_context = deaths.forking(core_death.died)
    multiproc_executor.get_mp_context = deaths.forking(deaths.end_with_worker, numa_nodes)

    # A call that fails on several workers raises at the first reply, and the other replies stay in their queues: each
    # later call takes them for its own. Removed by: vllm#57846.
    executor = multiproc_executor.MultiprocExecutor
    executor.collective_rpc = with_every_reply(executor.collective_rpc)

    # Only one worker replies to a step, and vLLM just logs the error of another one: the one that replies waits for it
    # in a collective, until vLLM gives up after five minutes (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS ends a long step too).
    # Removed by: vllm#53597, for vllm#23985.
    worker = multiproc_executor.WorkerProc
    worker._execute_worker_rpc = ends_out_of_step(worker._execute_worker_rpc)

    # Tensor-parallel workers communicate through segments in /dev/shm that only an orderly exit removes. Names chosen
    # here let the supervisor remove them after a crash; the CPU's collectives take theirs from the name of a file.
    # Removed by: an option for the prefix of these names.
    shared_memory._SHM_NAME_PREFIX = f"/{segment_prefix}"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(segment_prefix) + 1 + 2 * SEGMENT_NAME_BYTES
    multiproc_executor.get_file_store_init_method = functools.partial(_rendezvous_file, segment_prefix)


def _bound_requests() -> None:
    """What keeps one request from slowing or ending an engine's steps for all others."""
    grammars.apply()
    request_bounds.bound_time(backend_xgrammar.XgrammarGrammar)
    request_bounds.bound_time(backend_guidance.GuidanceGrammar)
    request_bounds.bound_tokens(BaseRenderer)
    request_bounds.bound_forbidden(InputProcessor)


def _patch_on_device(kind: str) -> None:
    """kind: of device, on which torch computes and which has memory of its own."""
    # vLLM caches compiled graphs by a hash that includes the model's path. Every version has its own path, so vLLM
    # would compile each new one again, for 30 s and more, into the same code. Removed by: vllm#53193.
    ModelConfig.compute_hash = _of_any_path(ModelConfig.compute_hash)
    # The warm parent's imports may have asked about its first GPU, and this engine's may be another kind.
    forget_devices(type(current_platform))
    if kind_of(kind).compiled_attention:
        prefer_ready_made(type(current_platform), kind_of(kind))
    # The front end imports classes of models too, and the core that it then forks has to find the devices unused.
    # Removed by: kernels of gated delta nets that do not ask for the device when they are imported.
    load = _LazyRegisteredModel.load_model_cls
    _LazyRegisteredModel.load_model_cls = with_device_at_import(load, current_platform, kind_of(kind))


def _patch_on_host(kind: str, eager: bool) -> None:
    # It applies the last slot's adapter to tokens without one (see there). Removed by: a mend of that in vLLM.
    punica_cpu.PunicaWrapperCPU = GroupedLoRA
    # vLLM asks a layer's weight where it lies, and the CPU's int8 kernel (compressed-tensors W8A8) has packed it
    # away by then. Removed by: a device of the layer in vLLM's BaseLinearLayerWithLoRA.
    host = torch.device(kind_of(kind).torch_type)
    base_linear._get_lora_device = lambda layer: host
    if eager:
        # vLLM applies torch.compile to small helpers (rank of a log-probability, vocabulary masks) even in eager
        # mode, and the first request that reaches one waits for a C++ compiler: 3 s warm, 30 s cold.
        torch.compiler.set_stance("force_eager")


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
    or an argument of the engine asks for it. Removed by: FlashInfer's ready-made kernels in the image for GPUs."""
    every = platform.get_valid_backends.__func__

    @functools.wraps(every)
    def get_valid_backends(cls: Any, device_capability: Any, attn_selector_config: Any, **more: Any) -> Any:
        found, refused = every(cls, device_capability, attn_selector_config, **more)
        ready = [one for one in found if kind.compiled_attention not in one.backend.name]
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
    """One reply of each worker. Raises RuntimeError with the first failure, TimeoutError. Ends the engine if a worker
    is silent while another has failed: it may be waiting for that one in a collective for ever."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    found: list[Any] = []
    failed: RuntimeError | None = None
    for queue in queues:
        try:
            status, result = queue.dequeue(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
        except TimeoutError as error:
            if failed is None:
                raise TimeoutError(f"RPC call to {method} timed out.") from error
            log.error("a worker is silent after another one has failed in %s: %s", method, failed)
            logging.shutdown()
            os._exit(OUT_OF_STEP)
        found.append(result)
        if status != multiproc_executor.WorkerProc.ResponseStatus.SUCCESS and failed is None:
            failed = RuntimeError(f"Worker failed with error '{result}'; the stack trace is in the engine's log")
            until_s = min(filter(None, (until_s, time.monotonic() + LATE_REPLY_S)))
    if failed is not None:
        raise failed
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


def _rendezvous_file(segment_prefix: str) -> str:
    # vLLM's CPU collectives name their segments by the base name of this file.
    return f"file://{tempfile.gettempdir()}/{segment_prefix}{uuid.uuid4().hex}"
