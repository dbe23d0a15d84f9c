"""What the serving warm parent imports, so that a forked engine is healthy in about a second and a half.

`python -m runtime.warm_parent --preload serve.preload`. vLLM imports much of itself lazily; the modules named here
were found by listing what a forked engine and its core still imported up to their first chat, structured and
embedding request. Rules: no OpenMP work, no CUDA initialisation, no thread left running: none survives a fork.
"""

from __future__ import annotations

import importlib
import os

# Read by OpenMP and by tokenizers when they are loaded; both must not start threads in this process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# torch.cuda.is_available() without this initialises CUDA, which no forked engine could use any more.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

FRONTEND = (
    "serve.engine",
    "vllm.renderers.hf",
    "vllm.transformers_utils.chat_templates.registry",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.instrumentator.offline_docs",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.entrypoints.serve.utils.orca_metrics",
    "vllm.entrypoints.serve.utils.sse_keep_alive",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.generative_scoring.serving",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.generate.structured_decisions.serving",
    "vllm.entrypoints.pooling.factories",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.derender.serving",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.v1.metrics.reader",
    "model_hosting_container_standards.sagemaker",
    "model_hosting_container_standards.common.custom_code_ref_resolver.file_loader",
    "vllm.tool_parsers.hermes_tool_parser",
    "vllm.tool_parsers.llama_tool_parser",
    "vllm.tool_parsers.mistral_tool_parser",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.structured_output.backend_lm_format_enforcer",
    "vllm.v1.structured_output.backend_outlines",
    "vllm.v1.structured_output.backend_xgrammar",
    "multiprocessing.popen_fork",
)
CORE = (
    "setproctitle",
    "xgrammar.kernels.apply_token_bitmask_inplace_cpu",
    "vllm.utils.cpu_triton_utils",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.model_loader.mtp_validation",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu_worker",
    "serve.cpu_worker",
    "serve.finishing_scheduler",
    "serve.shm_transfer",
    "serve.worker_extension",
)
# The architectures the appliance is made for; another one is imported by the engine that needs it.
MODELS = tuple(
    f"vllm.model_executor.models.{name}"
    for name in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "config", "adapters")
)


def _import_all() -> int:
    for name in (*FRONTEND, *CORE, *MODELS):
        importlib.import_module(name)
    return len(FRONTEND) + len(CORE) + len(MODELS)


IMPORTED = _import_all()
