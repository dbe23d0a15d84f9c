"""Attention over packed rows: every example sees itself alone, exactly, and nothing is spent on the rest.

Registered with transformers as the attention implementation "packed" (its AttentionInterface). `segments` travels
from the model call to every layer as a keyword. One call of torch's causal kernel per example costs the sum of
the squares of their lengths; a block-diagonal mask over the row would cost the square of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "packed"


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
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, tokens, dim), key and value (1, kv heads, tokens, dim) -> (1, tokens, heads, dim).

    `segments` are (start, end) token ranges that cover the row without gaps.
    """
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for start, end in segments:
        window = None
        if sliding_window is not None and end - start > sliding_window:
            window = _sliding_mask(end - start, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=window,
                is_causal=window is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2), None


def _sliding_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def register() -> None:
    """Make "packed" known to transformers; no mask is ever built for it."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
