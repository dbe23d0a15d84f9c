"""Keeps the linear layers of a quantised base in their stored form, for LoRA.

This is QLoRA (Dettmers et al., 2023) with formats of compressed-tensors, which vLLM serves: adapters are trained on
exactly the weights with which they are served.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import get_direct_state_dict
from torch.nn.functional import linear
from transformers import PreTrainedModel

_SHAPE = "weight_shape"
_FOUR_BITS = {"weight": ("weight_packed", torch.int32), "weight_scale": ("weight_scale", None)}


class QuantisedLinear(torch.nn.Linear):
    """A frozen linear layer (out, in) that decodes its weight for each product and then frees the decoded weight.

    Integers and 8-bit floats are stored as parameters of bytes (uint8): DeepSpeed casts every float parameter, and
    ZeRO-3 partitions and gathers bytes like any other parameter.
    """

    def __init__(self, layer: torch.nn.Linear, scheme: QuantizationScheme):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._scheme = scheme
        self._stored: dict[str, tuple[str, torch.dtype | None]] = {}  # parameter: stored name, dtype if kept as bytes
        self.bias = layer.bias
        for stored_name, tensor in get_direct_state_dict(layer).items():
            if stored_name in (_SHAPE, "bias"):
                continue
            name = stored_name.removesuffix("_packed")  # peft requires an attribute `weight`
            is_number = tensor.dtype in (torch.bfloat16, torch.float32)
            self._stored[name] = (stored_name, None if is_number else tensor.dtype)
            tensor = tensor if is_number else tensor.contiguous().view(torch.uint8)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def decoded(self) -> torch.Tensor:
        """Decode the weight (out, in) to the dtype of its scales."""
        if self._stored == _FOUR_BITS and self._scheme.weights.num_bits == 4:
            return _four_bits(self.weight, self.weight_scale, self.in_features)
        stored: dict[str, torch.Tensor | torch.Size] = {_SHAPE: torch.Size((self.out_features, self.in_features))}
        for name, (stored_name, dtype) in self._stored.items():
            tensor = self._parameters[name].detach()
            stored[stored_name] = tensor if dtype is None else tensor.view(dtype)
        compressor = BaseCompressor.get_value_from_registry(self._scheme.format.value)
        return compressor.decompress(stored, self._scheme)["weight"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Product.apply(inputs, self)


def _four_bits(packed: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Decode symmetric 4-bit weights as compressed-tensors does, with a fifth of the memory traffic.

    packed: (out, width / 2), two weights per byte, the lower bits first. scales: (out, groups per row)."""
    pairs = packed.detach()[:, : -(-width // 2)]
    weights = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :width]
    return ((weights.to(scales.dtype) - 8).unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)


class _Product(torch.autograd.Function):
    """Computes inputs (..., in) -> (..., out), without storing the decoded weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer = layer
        return linear(inputs, layer.decoded().to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.decoded().to(gradient.dtype), None


def keep_quantised(model: PreTrainedModel) -> None:
    """Replace, in place, every layer that transformers loaded in its stored form by a `QuantisedLinear`."""
    model.ct_decompress_hook.remove()  # this hook would decode the whole model in the first forward pass
    for name, layer in list(model.named_modules()):
        scheme = getattr(layer, "quantization_scheme", None)
        if isinstance(layer, torch.nn.Linear) and scheme is not None:
            model.set_submodule(name, QuantisedLinear(layer, scheme))
