"""Attention over packed rows: every example attends to its own tokens only, at no cost for the others.

It is registered with transformers as the attention implementation "packed" (AttentionInterface). Every layer receives
`segments` as a keyword of the model call. One call of torch's causal kernel per example costs the sum of the squares of
their lengths; a block-diagonal mask over the row would cost the square of the sum. On a GPU one kernel (FlashAttention
over sequences of different lengths) computes the whole row, with sliding windows, if precision and head size allow it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import varlen
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.devices.kinds import KINDS, in_host_memory
from train.plan.errors import UnsupportedModel

NAME = "packed"
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_WIDEST_HEAD = 256
_VARLEN_HEAD_STEP = 8
_NOT_DONE = ("position_bias", "s_aux", "softcap", "indices", "block_indices")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: tuple[tuple[int, int], ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, tokens, dim), key (1, kv heads, tokens, dim), value (1, kv heads, tokens, value dim)
    -> (1, tokens, heads, value dim).

    `segments` are (start, end) token ranges that cover the row without gaps. Raises UnsupportedModel for a layer that
    needs more: without its position bias Inkling would silently train wrong weights.
    """
    if left_out := [name for name in _NOT_DONE if further.get(name) is not None]:
        raise UnsupportedModel(
            f"{type(module).__name__} computes its attention with {' and '.join(left_out)}, which packed attention "
            "does not support"
        )
    grouped = query.shape[1] != key.shape[1]
    # Limits of FlashAttention. (GPUs before Ampere have no bfloat16.)
    width, on_gpu = max(query.shape[-1], value.shape[-1]), not in_host_memory(query.device)
    if on_gpu and query.dtype in _VARLEN_DTYPES and width <= _VARLEN_WIDEST_HEAD and not dropout:
        return _varlen(query, key, value, segments, scaling, sliding_window, grouped), None
    if grouped and on_gpu:
        # float32, or heads wider than 256 (Gemma 4 has 512 in one layer of six): of torch's fused kernels only CUTLASS
        # computes them. In torch 2.13 it takes no groups; with groups torch falls back to the plain computation, whose
        # memory is the square of an example's length.
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
        grouped = False
    lengths = [end - start for start, end in segments]
    outputs = []
    # Split, not slices: in the backward pass each slice makes a zero tensor of the whole row's size: for 32 examples 33
    # times the bytes of q, a split twice.
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        window = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            at = torch.arange(q.shape[2], device=query.device)
            distance = at[:, None] - at[None, :]
            window = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=window,
                is_causal=window is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2), None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[tuple[int, int], ...],
    scaling: float | None,
    sliding_window: int | None,
    grouped: bool,
) -> torch.Tensor:
    """The first result of `packed_attention`, by one kernel for the whole row. Arguments as there."""
    starts, longest = _bounds(segments, query.device)
    # The kernel's window does not count the token itself; `sliding_window` does.
    left = -1 if sliding_window is None or longest <= sliding_window else sliding_window - 1
    # The kernel takes heads of one width, a multiple of 8, and unlike scaled_dot_product_attention this call pads none
    # (torch's flash_api.cpp, mha_varlen_fwd). DeepSeek's values are narrower than its keys; OpenLLaMA 3B has heads of
    # 100. Zeros add nothing to a score, and the padding of the values is cut off.
    width = -(-max(query.shape[-1], value.shape[-1]) // _VARLEN_HEAD_STEP) * _VARLEN_HEAD_STEP
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # `pad` would copy even if there is nothing to add.
    q, k, v = (one if one.shape[-1] == width else pad(one, (0, width - one.shape[-1])) for one in (q, k, v))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = varlen.varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped
    )
    assert isinstance(out, torch.Tensor), "it returns more only if asked to"
    return out[None, ..., : value.shape[-1]]


@lru_cache(maxsize=4)  # all layers of a row, and their recomputation, need the same result
def _bounds(segments: tuple[tuple[int, int], ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """The examples' boundaries (examples + 1,) int32 on the device, and the longest example's tokens."""
    starts = torch.tensor([0, *(end for _, end in segments)], dtype=torch.int32)
    return starts.to(device, non_blocking=True), max(end - start for start, end in segments)


def register() -> None:
    """Register "packed" with transformers, and turn off kernels that are planned again for every length.

    No mask function is registered, so transformers builds no mask. For a mask it would first check on the device
    whether positions in a row restart, and wait for all work before (transformers/masking_utils.py,
    _preprocess_mask_arguments and find_packed_sequence_indices).
    """
    for kind in KINDS.values():
        kind.unplanned_attention()
    AttentionInterface.register(NAME, packed_attention)
