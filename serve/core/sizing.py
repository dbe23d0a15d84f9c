"""Computes an engine's memory from the sizes of the model and the device, so that vLLM gets explicit numbers.

By default vLLM takes a fraction of the device (or of NUMA node 0 on a CPU). The meaning of that fraction differs
between vLLM versions, and it ignores other engines and training on the same device.
"""

from __future__ import annotations

from typing import Any

from runtime.devices.kinds import kind_of
from serve.core.config import EngineConfig

CPU_KV_BYTES = 256 * 2**20
LEAST_KV_BYTES = 64 * 2**20
# Dense architectures for which vLLM takes adapters on every linear layer. On a CPU it takes none for experts.
ADAPTER_ARCHITECTURES = frozenset(
    f"{family}ForCausalLM"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Granite", "Olmo2", "Olmo3", "Phi3")
)
# Activations, CUDA context, graphs and the slots of adapters beside weights and KV; measured by vLLM's own profile at
# 1-4 GiB.
GPU_RESERVE_BYTES = 4 * 2**30


def adapter_rank_limit(config: EngineConfig, *, task: str, arch: str) -> int:
    """Return the largest adapter rank that engines of this model accept; 0: they accept no adapters."""
    taken = config.adapter_slots and task == "generate" and arch in ADAPTER_ARCHITECTURES
    return config.adapter_max_rank if taken else 0


class ModelTooLarge(ValueError):
    """The weights leave no room for a KV cache on this device."""


def engine_settings(
    config: EngineConfig,
    *,
    task: str,
    arch: str,
    max_position_embeddings: int | None,
    weight_bytes: int,
    tensor_parallel: int,
    device_kind: str,
    device_memory_bytes: int,
) -> dict[str, Any]:
    """Return the fields of a ReplicaSpec that follow from model and device.

    `weight_bytes` is for the whole model, of which each of `tensor_parallel` devices holds a part; the returned
    `kv_cache_bytes` is per device. Raises ModelTooLarge.
    """
    rank = adapter_rank_limit(config, task=task, arch=arch)
    adapters = {
        "adapter_slots": config.adapter_slots,
        "adapter_max_rank": rank,
        "adapters_resident": max(config.adapters_resident, config.adapter_slots),
    }
    longest = min(filter(None, (config.max_model_len, max_position_embeddings)), default=None)
    return {
        "task": task,
        "dtype": "bfloat16" if kind_of(device_kind).computes_bf16() else "float32",
        "max_model_len": longest,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_bytes": config.kv_cache_bytes
        or _kv_bytes(weight_bytes // tensor_parallel, device_kind, device_memory_bytes, config.gpu_memory_fraction),
        "gpu_memory_fraction": config.gpu_memory_fraction,
        **(adapters if rank else {}),
    }


def _kv_bytes(weight_bytes: int, device_kind: str, device_memory_bytes: int, fraction: float) -> int:
    if kind_of(device_kind).on_host:
        return CPU_KV_BYTES
    left = int(device_memory_bytes * fraction) - weight_bytes - GPU_RESERVE_BYTES
    if left < LEAST_KV_BYTES:
        raise ModelTooLarge(
            f"{weight_bytes} bytes of weights per device and {GPU_RESERVE_BYTES} in reserve leave {left} bytes of "
            f"{device_memory_bytes} for the KV cache, at least {LEAST_KV_BYTES} are needed: "
            "raise the deployment's tensor_parallel"
        )
    return left
