"""Loads a version through vLLM's own layerwise reload: slower than serve.load.direct_load, but works for every model.

vLLM's layerwise reload (vllm/model_executor/model_loader/reload, docs "Layerwise weight reloading") was written for
GPUs. This module corrects three CPU bugs in it, each reproduced on vLLM 0.32:
- an output head that shares the input embedding silently keeps its packed copy of the old weights;
- MoE experts are left unpacked although their kernel reads packed ones;
- an error in the middle leaves half of the layers on the meta device, where every later reload fails.
And one on any device: what a whole model makes of its weights once they are loaded (DeepSeek V4) stayed the first
version's, because the first load alone calls for it (process_weights_after_loading in
vllm/model_executor/model_loader/utils.py). serve.load.remade_experts mends another.
And on GPUs two of biases, which the reload leaves in their layers as kernels laid them out:
- those of layers in 4 bits (Qwen2.5 as AWQ or GPTQ before Hopper) lie in other memory after it, while captured graphs
  read where they were: vllm/model_executor/kernels/linear/mixed_precision/marlin.py;
- others are replaced by parameters that do not know which part of them a stored one is, or filled up to a length that
  the kernel wants, so that no version can be loaded: FP8 before Ada and FP4 before Blackwell (marlin_utils_fp8.py and
  marlin_utils_fp4.py in vllm/model_executor/layers/quantization/utils), and what Humming computes, to a multiple of 256
  (utils/humming/linear.py there).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from vllm.model_executor.utils import set_weight_attrs

from runtime.devices.kinds import of_torch
from serve.load.remade_experts import with_experts
from serve.load.shm_source import VersionSource


def load_layerwise(
    model: torch.nn.Module, model_config: ModelConfig, source: VersionSource, device: torch.device
) -> None:
    """Load every tensor of `source` (mapped) into `model`. After an error the old tensors are back in place, but some
    may already hold new values: load a whole version again before serving."""
    on_host = of_torch(device).on_host
    with nullcontext() if on_host else _where_it_was(model):
        try:
            with with_experts(model, model_config.dtype, device):
                initialize_layerwise_reload(model)
                _make_biases_loadable(model)
                with disable_mtp_completeness_check(), torch.no_grad():
                    model.load_weights(source.tensors())
                finalize_layerwise_reload(model, model_config)
        except BaseException:
            _put_back(model)
            raise
        if on_host:
            _repack(model)
        if hasattr(model, "process_weights_after_loading"):
            with torch.no_grad():
                model.process_weights_after_loading()


def _make_biases_loadable(model: torch.nn.Module) -> None:
    """Give layers whose bias is not as stored any more one to load, in a reload that has begun and remembers theirs."""
    for layer in model.modules():
        if not isinstance(layer, LinearBase) or (laid_out := getattr(layer, "bias", None)) is None:
            continue
        stored = laid_out.new_zeros(sum(layer.output_partition_sizes))
        if hasattr(laid_out, "output_dim") and laid_out.shape == stored.shape:
            continue
        layer.bias = torch.nn.Parameter(stored, requires_grad=False)
        set_weight_attrs(layer.bias, {"output_dim": 0, "weight_loader": layer.weight_loader})
        initialize_online_processing(layer)


@contextmanager
def _where_it_was(model: torch.nn.Module) -> Iterator[None]:
    """After it, also after an error, every parameter and buffer lies where it lay before, with what it holds now."""
    before = [(tensor, tensor.data) for tensor in chain(model.parameters(), model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, first in before:
                if tensor.data_ptr() != first.data_ptr() and tensor.shape == first.shape:
                    first.copy_(tensor.data)
                    tensor.data = first


def _put_back(model: torch.nn.Module) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


@torch.no_grad()
def _repack(model: torch.nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
        elif isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
