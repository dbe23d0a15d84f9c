"""Applies all of this project's patches to vLLM 0.32; each states its reason and when it can be removed.

The forked engine process applies them once, before it forks its engine core; the core and its workers inherit the
patched modules. The patches fit the pinned version; tests/e2e/test_engine_contract.py fails if an upgrade moves patched
code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.lora.layers import base_linear
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.platforms import current_platform

from runtime.devices.kind import HOST_MEMORY, DeviceKind
from runtime.devices.kinds import kind_of
from serve.vllm import grammars

SEGMENT_NAME_BYTES = 8
_applied: list[bool] = []


def apply(kind: str, *, eager: bool, segment_prefix: str) -> None:
    """Apply all patches; idempotent. `kind`: kind of device; `eager`: the engine runs without compiled graphs."""
    if _applied:
        return
    _applied.append(True)
    grammars.apply()
    # Tensor-parallel workers communicate through segments in /dev/shm that only an orderly exit removes. With a known
    # prefix the supervisor can remove the segments after a crash. Remove with: an option for the prefix.
    shared_memory._SHM_NAME_PREFIX = f"/{segment_prefix}"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(segment_prefix) + 1 + 2 * SEGMENT_NAME_BYTES
    if kind_of(kind).on_host:
        _patch_on_host(eager)
    else:
        _patch_on_device(kind)


def _patch_on_device(kind: str) -> None:
    """Apply the patches for `kind`, a kind of device that has its own memory and on which torch computes."""
    # vLLM caches compiled graphs by a hash that includes the model's path. Every version has another path, so vLLM
    # would compile the same code again for each version, for 30 s and more. Remove with: vllm#53193.
    ModelConfig.compute_hash = _of_any_path(ModelConfig.compute_hash)
    # The warm parent's imports may have cached the first GPU's properties; this engine's GPU may differ.
    forget_devices(type(current_platform))
    if kind_of(kind).compiled_attention:
        prefer_ready_made(type(current_platform), kind_of(kind))
    # The front end imports model classes too, but must not touch a device before it forks the core. Remove with: gated
    # delta net kernels that do not query the device at import.
    load = _LazyRegisteredModel.load_model_cls
    _LazyRegisteredModel.load_model_cls = with_device_at_import(load, current_platform, kind_of(kind))


def _patch_on_host(eager: bool) -> None:
    # vLLM's wrapper applies the last slot's adapter to tokens without an adapter, and for a prompt takes 17 times as
    # long as the layer itself. Remove with: a fix in vLLM, and adapter kernels for the CPU.
    punica_cpu.PunicaWrapperCPU = GroupedLoRA
    # vLLM places an adapter on the device of the layer's weight, but kernels of quantised layers have replaced that
    # weight. Remove with: vLLM using its platform's device.
    base_linear._get_lora_device = lambda base_layer: torch.device(HOST_MEMORY)
    if eager:
        # Even in eager mode vLLM applies torch.compile to small helpers (rank of a log-probability, vocabulary masks);
        # their first use waits for a C++ compiler: 3 s with a warm cache, 30 s without.
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
    """Wrap `load`, which imports a model class whose modules may query the device. `platform`: vLLM's platform, which
    answers device queries without touching the device."""

    @functools.wraps(load)
    def run(model: Any) -> type:
        with kind.device_at_import(lambda: (tuple(platform.get_device_capability()), platform.get_device_name())):
            return load(model)

    return run


def prefer_ready_made(platform: Any, kind: DeviceKind) -> None:
    """Make vLLM's platform choose an attention backend that needs a compiler only if no other computes the model, or an
    engine argument names it. Remove with: FlashInfer's precompiled kernels in the image for GPUs."""
    every = platform.get_valid_backends.__func__

    @functools.wraps(every)
    def get_valid_backends(cls: Any, device_capability: Any, attn_selector_config: Any, **more: Any) -> Any:
        backends, refused = every(cls, device_capability, attn_selector_config, **more)
        ready = [backend for backend in backends if kind.compiled_attention not in backend.backend.name]
        return ready or backends, refused

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


class GroupedLoRA(punica_cpu.PunicaWrapperCPU):
    """Computes one pair of matrix products for each adapter in the batch. vLLM 0.32 copies both factors for every
    token, and takes the index -1 of a token without an adapter for the last slot."""

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, downs: Any, ups: Any, scale: float, widths: Any, **kwargs: Any
    ) -> None:
        """y (tokens, sum of `widths`) += x (tokens, in) @ A^T @ B^T * scale, each token with its own adapter. Factors
        are stacked by slot: `downs` A (slots, 1, rank, in), `ups` B (slots, 1, out, rank), one pair per slice of y."""
        slots = self.token_lora_indices
        for slot in set(slots.tolist()) - {-1}:
            rows, start = (slots == slot).nonzero().view(-1), 0
            for down, up, width in zip(downs, ups, widths, strict=True):
                y[rows, start : start + width] += (x[rows] @ down[slot, 0].T) @ up[slot, 0].T * scale
                start += width
