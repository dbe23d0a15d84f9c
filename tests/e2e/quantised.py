"""Tiny quantised checkpoints, written by hand in the tensor layout that each format documents, and their decoded
weights.

Sources: compressed-tensors (`pack-quantized`, `int-quantized`), AutoAWQ (GEMM), GPTQ (AutoGPTQ), and FP8 as documented
by vLLM and DeepSeek (`weight_scale_inv`, blocks of 128 by 128).
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
USUAL_GROUP = 128  # in most public models; Hopper has another kernel for it
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
# A linear layer's weight (out, in) -> stored tensors by the last part of their name, and the decoded weight.
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values (…, n) into int32 (…, n / 8), the first in the lowest bits."""
    shifts = torch.arange(8) * 4
    words = (values.to(torch.int64).view(*values.shape[:-1], -1, 8) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _grouped(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 with zero point 8 (out, in), scales (out, in / size) in float16, and the decoded weight."""
    groups = weight.float().view(weight.shape[0], -1, size)
    scales = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    values = (groups / scales).round().clamp(-8, 7)
    return (values + 8).view_as(weight).int(), scales[..., 0].half(), (values * scales).view_as(weight)


def w4a16(weight: torch.Tensor, size: int) -> tuple[Tensors, torch.Tensor]:
    values, scales, means = _grouped(weight, size)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": _packed(values), "weight_scale": scales, "weight_shape": shape}, means


def w8a8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scales).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def awq(weight: torch.Tensor, size: int) -> tuple[Tensors, torch.Tensor]:
    values, scales, means = _grouped(weight, size)
    turned = values.t().reshape(weight.shape[1], -1, 8)[..., AWQ_ORDER].reshape(weight.shape[1], -1)
    zeros = torch.full((weight.shape[1] // size, weight.shape[0]), 8)
    return {"qweight": _packed(turned), "qzeros": _packed(zeros), "scales": scales.t()}, means


def gptq(weight: torch.Tensor, size: int) -> tuple[Tensors, torch.Tensor]:
    values, scales, means = _grouped(weight, size)
    zeros = torch.full((weight.shape[1] // size, weight.shape[0]), 7)  # stored minus one
    stored = {"qweight": _packed(values).t(), "qzeros": _packed(zeros), "scales": scales.t()}
    return stored | {"g_idx": (torch.arange(weight.shape[1]) // size).int()}, means


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.float().abs().max() / 448
    values = (weight.float() / scale).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    out, inner = weight.shape
    blocks = weight.float().view(out // 128, 128, inner // 128, 128)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scales).to(FP8)
    means = (values.float() * scales).view(out, inner)
    return {"weight": values.view(out, inner), "weight_scale_inv": scales[:, 0, :, 0]}, means


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _formats(size: int) -> dict[str, tuple[Quantise, dict[str, Any]]]:
    """Quantiser and configuration of each format, by name; 4-bit formats have groups of `size`."""
    four_bits = {"bits": 4, "group_size": size}
    packed = {"num_bits": 4, "strategy": "group", "group_size": size}
    fp8_dynamic = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {
        "w4a16": (partial(w4a16, size=size), _compressed("pack-quantized", packed, None)),
        "w8a8": (w8a8, _compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, _PER_TOKEN)),
        "awq": (partial(awq, size=size), {"quant_method": "awq", "zero_point": True, "version": "gemm"} | four_bits),
        "gptq": (partial(gptq, size=size), {"quant_method": "gptq", "desc_act": False, "sym": True} | four_bits),
        "fp8": (fp8, fp8_dynamic),
        "fp8-blocks": (fp8_blocks, fp8_dynamic | {"fmt": "e4m3", "weight_block_size": [128, 128]}),
    }


FORMATS = tuple(_formats(GROUP))


def write(source: Path, form: str, quantised: Path, means: Path, size: int = GROUP) -> None:
    """Write the checkpoint `source` in format `form`, with groups of `size`, to `quantised`; decoded, to `means`."""
    quantise, config = _formats(size)[form]
    stored, plain = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = plain[name] = weight
            continue
        parts, plain[name] = quantise(weight)
        stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    for directory, tensors in ((quantised, stored), (means, plain)):
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        for file in source.glob("*.json*"):
            (directory / file.name).write_bytes(file.read_bytes())
    described = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (quantised / "config.json").write_text(json.dumps(described))
