"""What a layer keeps of each token until its backward pass has used it, in bytes of bfloat16. Pure.

Counted as Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (arXiv:2205.05198),
section 4.1 do, for attention whose scores are recomputed and a gated MLP, with the norms' copies in fp32. h: the hidden
size, q and k: elements of a token's queries and of its keys, f: the width of the MLP that it passes, e: its experts.

    norms       2 x (4 h in fp32, 2 h of their result before the weight, 2 h as the input of the next product)
    attention   4 (q + k): queries, keys, values and result
    MLP         8 f: gate, its activation, the other matrix's result, and their product; of experts, whose input is a
                copy for each and whose result is weighed, 4 e h more

In its backward pass one layer works with 8 h + 2 f + 2 e h more: gradients that come and go. With adapters it keeps
less, because frozen weights do without their inputs, and works with as much.
"""

from __future__ import annotations

from typing import Any

_HEADS = (0, 6)  # queries and keys are normed too: 4 (q + k) in fp32 and 2 (q + k)
# By model type: bytes of a hidden element and of an element of queries and keys that its norms keep beyond two of the
# hidden size in the way of Llama's. tests/unit/train/test_layer_memory.py holds them against what torch keeps.
_NORMS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "exaone4", "hunyuan_v1_dense"), _HEADS),
    **dict.fromkeys(("olmo2", "olmo3"), (2, 8)),
    "gemma": (4, 0),
    **dict.fromkeys(("gemma3", "gemma3_text"), (18, 8)),  # four norms, in fp32 up to their result
    **dict.fromkeys(("gemma4", "gemma4_text"), (28, 9)),  # of values too
    "glm4": (9, 2),
    "glm4_moe": (6, 6),  # its router works in fp32
    "phi3": (0, 4),  # no norms: queries, keys and values of one product, which stays whole
}


def norms_of(model_type: Any) -> tuple[int, int]:
    """`model_type` as a config.json has it, if it has one."""
    return _NORMS.get(model_type, (0, 0)) if isinstance(model_type, str) else (0, 0)


def layer_bytes(hidden: int, heads: int, ffn: int, *, experts: int, norms: tuple[int, int], shards: int = 1) -> int:
    """What one layer keeps. heads: q + k. experts: e, 0 of a dense model. shards: ranks of a tensor-parallel group,
    which share heads and MLP."""
    of_hidden, of_heads = norms
    cut = (4 + of_heads) * heads + 8 * ffn + 4 * experts * hidden
    return (16 + of_hidden) * hidden + cut // shards


def working_bytes(hidden: int, ffn: int, *, experts: int, shards: int = 1) -> int:
    """What the layer whose backward pass runs works with. Arguments as above."""
    return 8 * hidden + (2 * ffn + 2 * experts * hidden) // shards
