"""Keeps a base's linear layers in the few bits they are stored in, for LoRA on a quantised base.

QLoRA (Dettmers et al., 2023) with the formats of compressed-tensors, which vLLM serves: what is trained against is bit
for bit what serves beside the adapter.
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


class QuantisedLinear(torch.nn.Linear):
    """A frozen linear layer (out, in) that decodes its weight for each product and keeps nothing of it.

    Integers and 8-bit floats are parameters of bytes (uint8): DeepSpeed casts whatever is a float, and ZeRO-3 parts and
    gathers them like any other.
    """

    def __init__(self, layer: torch.nn.Linear, scheme: QuantizationScheme):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._scheme = scheme
        self._stored: dict[str, tuple[str, torch.dtype]] = {}  # by parameter: its name in the checkpoint, its dtype
        self.register_parameter("bias", None)
        for stored_name, tensor in get_direct_state_dict(layer).items():
            if stored_name == _SHAPE or tensor is None:
                continue
            name = stored_name.removesuffix("_packed")  # peft wants a `weight`
            self._stored[name] = (stored_name, tensor.dtype)
            if tensor.dtype not in (torch.bfloat16, torch.float32):
                tensor = tensor.contiguous().view(torch.uint8)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def decoded(self) -> torch.Tensor:
        """The weight (out, in) in the dtype of its scales."""
        stored: dict[str, torch.Tensor | torch.Size] = {_SHAPE: torch.Size((self.out_features, self.in_features))}
        for name, (stored_name, dtype) in self._stored.items():
            tensor = self._parameters[name].detach()
            stored[stored_name] = tensor.view(dtype) if tensor.dtype == torch.uint8 else tensor
        compressor = BaseCompressor.get_value_from_registry(self._scheme.format.value)
        return compressor.decompress(stored, self._scheme)["weight"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Product.apply(inputs, self)


class _Product(torch.autograd.Function):
    """inputs (..., in) -> (..., out). Autograd's own would keep the decoded weight until the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer = layer
        return linear(inputs, layer.decoded().to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.decoded().to(gradient.dtype), None


def keep_quantised(model: PreTrainedModel) -> None:
    """Replace, in place, every layer that transformers has loaded as it is stored by a `QuantisedLinear`."""
    model.ct_decompress_hook.remove()  # it would decode the whole model in the first forward pass
    for name, layer in list(model.named_modules()):
        scheme = getattr(layer, "quantization_scheme", None)
        if isinstance(layer, torch.nn.Linear) and scheme is not None:
            model.set_submodule(name, QuantisedLinear(layer, scheme))
