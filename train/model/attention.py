"""Attention over packed rows: an example attends only to its own tokens; no attention between examples is computed.

It is registered with transformers as the attention implementation "packed" (AttentionInterface). Every layer receives
`segments` as a keyword of the model call. With one call of torch's causal kernel per example, time grows with the sum
of the squared lengths; with a block-diagonal mask over the row it would grow with the square of the sum. On a GPU one
kernel (FlashAttention over sequences of different lengths) computes the whole row, with sliding windows, if precision
and head size allow it.
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
    passes further inputs: Inkling, without its position bias, would silently train wrong weights.
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
        # For float32, or heads wider than 256 (Gemma 4 has 512 in one layer of six), torch has only the CUTLASS kernel.
        # In torch 2.13 this kernel does not support grouped heads; with these torch falls back to unfused operations,
        # whose memory grows with the square of an example's length.
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
        grouped = False
    lengths = [end - start for start, end in segments]
    outputs = []
    # Split instead of slicing: in the backward pass each slice makes a zero tensor of the whole row's size. For 32
    # examples slices take 33 times the bytes of q, a split takes 2 times.
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
    """Return the attention of `packed_attention`, which has the same arguments, by one kernel for the whole row."""
    starts, longest = _bounds(segments, query.device)
    # The kernel's window does not count the token itself, but `sliding_window` counts it.
    left = -1 if sliding_window is None or longest <= sliding_window else sliding_window - 1
    # The kernel needs heads of one width, a multiple of 8, and unlike scaled_dot_product_attention it pads no head
    # (torch's flash_api.cpp, mha_varlen_fwd). DeepSeek's values are narrower than its keys; OpenLLaMA 3B has heads of
    # 100. Zeros add nothing to a score, and the padding of values is cut off.
    width = -(-max(query.shape[-1], value.shape[-1]) // _VARLEN_HEAD_STEP) * _VARLEN_HEAD_STEP
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # `pad` would copy even if no padding is needed.
    q, k, v = (one if one.shape[-1] == width else pad(one, (0, width - one.shape[-1])) for one in (q, k, v))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = varlen.varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped
    )
    assert isinstance(out, torch.Tensor), "it returns more only if asked to"
    return out[None, ..., : value.shape[-1]]


@lru_cache(maxsize=4)  # cached, because all layers of a row, and their recomputation, need the same result
def _bounds(segments: tuple[tuple[int, int], ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the examples' boundaries, (examples + 1,) int32 on the device, and the longest example's token count."""
    starts = torch.tensor([0, *(end for _, end in segments)], dtype=torch.int32)
    return starts.to(device, non_blocking=True), max(end - start for start, end in segments)


def register() -> None:
    """Register "packed" with transformers, and disable kernels that would be planned anew for every length.

    No mask function is registered, so transformers builds no mask. To build a mask, it would check on the device
    whether positions in a row restart, and so wait for all earlier work (transformers/masking_utils.py,
    _preprocess_mask_arguments and find_packed_sequence_indices).
    """
    for kind in KINDS.values():
        kind.unplanned_attention()
    AttentionInterface.register(NAME, packed_attention)
