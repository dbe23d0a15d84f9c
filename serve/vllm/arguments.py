"""Builds vLLM's command line from a replica's spec. Pure.

The forked engine uses vLLM's own argument parser, so `extra_args` may add any argument of `vllm serve`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from runtime.devices.kinds import kind_of
from serve.core.model_settings import with_system_prompt
from serve.core.parsers import reasoning_parser, tool_parser
from serve.core.sizing import ADAPTER_MODULES, lora_rank_bound
from serve.core.spec import ReplicaSpec
from weights.format.tool_template import with_tools

EXECUTOR = "serve.vllm.deaths.ShmExecutor"
CPU_WORKER, GPU_WORKER = "serve.vllm.cpu_worker.ShmCPUWorker", "serve.vllm.worker.ShmGPUWorker"
CPU_PROMPT_TOKENS = 256
"""Tokens of one prompt in a step on the CPU, where each takes milliseconds and streams wait for the step."""
LOAD_FORMAT = "shm"


def engine_arguments(
    spec: ReplicaSpec, model_config: Mapping[str, Any], chat_template: str | None, tokens: Collection[str] = ()
) -> list[str]:
    """Return the command line of vLLM's OpenAI server for this replica.

    `model_config` is the version's config.json, `chat_template` the version's template text or None, `tokens` the
    subset of PARSER_TOKENS that the tokenizer has.
    """
    kind = kind_of(spec.kind)
    values = {
        "--model": spec.version_path,
        "--served-model-name": spec.model,
        "--uds": spec.socket_path,
        "--load-format": LOAD_FORMAT,
        "--worker-cls": CPU_WORKER if kind.on_host else GPU_WORKER,
        "--dtype": spec.dtype,
        "--tensor-parallel-size": str(spec.tensor_parallel),
        "--kv-cache-memory-bytes": str(spec.kv_cache_bytes),
        "--max-num-seqs": str(spec.max_num_seqs),
        "--fingerprint-mode": "custom",
        "--fingerprint-value": spec.version,
        "--scheduling-policy": "priority",  # the gateway sets each request's priority
        "--structured-outputs-config.backend": "guidance",  # serve.vllm.grammars
        "--structured-outputs-config.disable_any_whitespace": "true",  # prevents endless whitespace in JSON answers
    }
    args = [word for pair in values.items() for word in pair]
    args += ["--disable-uvicorn-access-log", "--no-enable-log-requests", "--disable-fastapi-docs"]
    args += ["--enable-prompt-tokens-details"]
    args += kind.engine_arguments()
    if kind.on_host:
        args += ["--enforce-eager"]
    else:
        # Otherwise vLLM refuses to start if less than its default fraction is free, whatever the KV cache size; but
        # sleeping engines hold a CUDA context and more on the device.
        args += ["--gpu-memory-utilization", str(spec.gpu_memory_fraction)]
    if spec.tensor_parallel > 1:
        args += ["--distributed-executor-backend", EXECUTOR]
    if spec.max_model_len is not None:
        args += ["--max-model-len", str(spec.max_model_len)]
    if spec.adapter_slots:
        args += [
            "--enable-lora",
            "--max-loras",
            str(spec.adapter_slots),
            "--max-lora-rank",
            str(lora_rank_bound(spec.adapter_max_rank)),
            "--max-cpu-loras",
            str(spec.adapters_resident),
            # Exclude embedding and head: by default vLLM would wrap them and call the wrappers in every step.
            "--lora-target-modules",
            *ADAPTER_MODULES,
        ]
    if spec.otlp_endpoint:
        args += ["--otlp-traces-endpoint", spec.otlp_endpoint.rstrip("/") + "/v1/traces"]
    if spec.task == "embed":
        args += ["--runner", "pooling", "--convert", "embed"]
    else:
        args += _generation_arguments(spec, model_config, chat_template, tokens)
    return [*args, *spec.extra_args]


def _generation_arguments(
    spec: ReplicaSpec, model_config: Mapping[str, Any], chat_template: str | None, tokens: Collection[str]
) -> list[str]:
    # Enables vLLM's renderer, which counts the tokens of an input (/v1/responses/input_tokens); the gateway blocks the
    # other routes that this option enables.
    args = ["--enable-scale-out"]
    if kind_of(spec.kind).on_host and "vision_config" not in model_config:  # an image's tokens cannot be split
        bounds = CPU_PROMPT_TOKENS, spec.max_model_len, model_config.get("max_position_embeddings")
        args += ["--long-prefill-token-threshold", str(min(filter(None, bounds)))]
    model_type = model_config.get("model_type")
    tooled = with_tools(spec.chat_template or chat_template)
    shown = with_system_prompt(tooled, spec.system_prompt)
    if shown != chat_template:
        args += ["--chat-template", str(shown)]
    if (calls := spec.tool_parser or tool_parser(model_type, tooled, tokens) or "none") != "none":
        args += ["--enable-auto-tool-choice", "--tool-call-parser", calls]
    if (thinks := spec.reasoning_parser or reasoning_parser(model_type, tooled) or "none") != "none":
        args += ["--reasoning-parser", thinks]
    return args


def engine_environment(spec: ReplicaSpec, max_sequences_per_request: int) -> dict[str, str]:
    """Environment variables for vLLM and its libraries, set in the forked process before it builds its engine."""
    env = {
        "VLLM_MAX_N_SEQUENCES": str(max_sequences_per_request),
        # "auto" pins every engine of a machine to the same first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(spec.threads_per_worker),
        # Required for vLLM to resolve unknown adapters (serve.vllm.adapters).
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if spec.adapter_slots else "0",
        "VLLM_SERVER_DEV_MODE": "0",
        # By default the sockets between front end and core are in /tmp, where every user may connect to them.
        "VLLM_RPC_BASE_PATH": spec.scratch_path,
        "TMPDIR": spec.scratch_path,
        # All processes of an engine are on one node, so their traffic uses the loopback interface.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.otlp_endpoint:
        env |= {
            "OTEL_SERVICE_NAME": "appliance-engine",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            # Seconds per export; an unreachable collector may delay an engine's end by this long.
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3",
        }
    kind = kind_of(spec.kind)
    if kind.on_host:
        # Runs the single CPU worker inside the engine core: this saves one process and one hop. vLLM needs a separate
        # worker only for thread binding, which is off.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env | kind.visibility(spec.devices) | kind.engine_environment()
