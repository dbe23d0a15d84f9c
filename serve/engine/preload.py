"""Imports modules in the serving warm parent, so that a forked engine is healthy in about 1.5 s.

`python -m runtime.processes.warm_parent SOCKET serve.engine.preload LOG`. vLLM imports many of its modules lazily; this
list names what a forked engine and its core still imported up to their first chat, structured and embedding request.
Rules: no OpenMP work, no CUDA initialisation, no running threads, because none survives a fork.

The CPU and GPU workers exclude each other: importing vLLM's CPU worker replaces torch's streams, events and pinned
memory with no-op stubs (vllm/v1/worker/cpu/shm.py). An engine on a GPU would then read results before their copy has
finished.
"""

from __future__ import annotations

import importlib
import os
import sys

from runtime.devices import kinds
from runtime.devices.kind import DeviceKind

# OpenMP and tokenizers read these when loaded; neither may start threads in this process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.update(kinds.FORK_ENVIRONMENT)

FRONTEND = (
    "serve.engine.main",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.tool_parsers.hermes_tool_parser",
    "vllm.tool_parsers.llama_tool_parser",
    "vllm.tool_parsers.mistral_tool_parser",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "llguidance.hf",
    "llguidance.torch",
    "multiprocessing.popen_fork",
)
CORE = (
    "setproctitle",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu_worker",
    "serve.vllm.worker",
)
CORE_OF_CPU = (
    "xgrammar.kernels.apply_token_bitmask_inplace_cpu",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "serve.vllm.cpu_worker",
)
# The architectures that the appliance targets; an engine imports other architectures itself.
MODELS = tuple(
    f"vllm.model_executor.models.{name}"
    for name in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "config", "adapters")
)


def names(kind: DeviceKind) -> tuple[str, ...]:
    """Return the modules to import for engines on such devices, in import order."""
    # Exclude vLLM's GPU code: part of it (vllm.compilation.backends) imports FlashInfer, whose import initialises CUDA.
    # Only a test on a GPU can show which modules do not initialise CUDA.
    return (*FRONTEND, *CORE, *(CORE_OF_CPU if kind.on_host else ()), *MODELS)


def _import_all() -> int:
    on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()  # by vLLM's build
    modules = names(kinds.HOST if on_cpu else kinds.present())
    for name in modules:
        importlib.import_module(name)
    _import_routes()
    return len(modules)


def _import_routes() -> None:
    """vLLM imports its routes when it builds an application with them; this one is dropped, with its metrics."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    arguments = sys.modules["serve.engine.main"].PARSER.parse_args(["--model", "none", "--enable-lora"])
    before = set(registry._names_to_collectors.values())
    importlib.import_module("vllm.entrypoints.launchers.app").build_app(arguments, ("generate", "embed", "render"))
    for collector in set(registry._names_to_collectors.values()) - before:
        registry.unregister(collector)


IMPORTED = _import_all()
