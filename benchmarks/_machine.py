"""Models for the benchmarks, and this machine's rates, with which the benchmarks compare their figures."""

from __future__ import annotations

import time

import torch


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 16000) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
    }


SIZES = {
    "5M": _llama(256, 688, 4, 4, 4096),
    "25M": _llama(384, 1024, 10, 6, 8192),
    "50M": _llama(512, 1536, 12, 8),
    "200M": _llama(1024, 2816, 14, 16),
}
"""Shapes of random Llamas."""


def copy_s(nbytes: int) -> float:
    """Return the seconds of the fastest of five warm memory copies with one thread."""
    torch.set_num_threads(1)
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def native_dtype() -> str:
    """Return bfloat16 if the processor multiplies it natively, else float32: emulation is many times slower."""
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
