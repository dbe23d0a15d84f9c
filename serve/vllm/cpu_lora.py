"""Computes LoRA on the CPU with one pair of matrix products per adapter in the batch.

vLLM's own code (vllm/lora/punica_wrapper/punica_cpu.py, 0.32) gathers both factors per token, in float32, which costs a
copy of the adapter for every token of a prompt. It also uses index -1 for a token without an adapter, which in Python
is the last slot: in a mixed batch it applies the adapter in that slot to such a token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

NO_ADAPTER = -1


class GroupedLoRA(PunicaWrapperCPU):
    """Rows are tokens. `_groups` is computed once per step and used by every layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: list[tuple[int, torch.Tensor]] = []

    def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(mapping, *args, **kwargs)
        self._groups = groups(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y (tokens, sum of `output_slices`) += x (tokens, in) @ A^T @ B^T * scale, each token by its own adapter.

        The factors are stacked by slot: A (slots, 1, rank, in), B (slots, 1, out, rank), one pair per slice of y.
        """
        for slot, rows in self._groups:
            part, start = x[rows], 0
            for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                delta = (part @ down[slot, 0].T) @ up[slot, 0].T
                y[rows, start : start + width] += delta if scale == 1 else delta * scale
                start += width


def groups(slot_of_token: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return each slot in use with the indexes of its tokens."""
    slots = [slot for slot in torch.unique(slot_of_token).tolist() if slot != NO_ADAPTER]
    return [(slot, (slot_of_token == slot).nonzero().view(-1)) for slot in slots]
