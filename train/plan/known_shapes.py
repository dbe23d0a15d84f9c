"""Shapes of published models, as their config.json gives them: a job can be planned for one that is not here."""

from __future__ import annotations

import re
from typing import Any

LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL, PHI3 = (
    f"{family}ForCausalLM" for family in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Phi3")
)
_COLUMNS = tuple(
    (
        "architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "intermediate_size vocab_size tie_word_embeddings max_position_embeddings"
    ).split()
)
_DENSE: dict[str, tuple[Any, ...]] = {
    "smollm2-135m": (LLAMA, 576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    "smollm2-1.7b": (LLAMA, 2048, 24, 32, 32, 64, 8192, 49152, True, 8192),
    "llama-3.2-1b": (LLAMA, 2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    "llama-3.2-3b": (LLAMA, 3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    "llama-3.1-8b": (LLAMA, 4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "llama-3.1-70b": (LLAMA, 8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "llama-3.3-70b": (LLAMA, 8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "llama-3.1-405b": (LLAMA, 16384, 126, 128, 8, 128, 53248, 128256, False, 131072),
    "qwen2.5-0.5b": (QWEN2, 896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "qwen2.5-1.5b": (QWEN2, 1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "qwen2.5-3b": (QWEN2, 2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "qwen2.5-7b": (QWEN2, 3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "qwen2.5-14b": (QWEN2, 5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    "qwen2.5-32b": (QWEN2, 5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    "qwen2.5-72b": (QWEN2, 8192, 80, 64, 8, 128, 29568, 152064, False, 32768),
    "qwen3-0.6b": (QWEN3, 1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    "qwen3-1.7b": (QWEN3, 2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    "qwen3-4b": (QWEN3, 2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "qwen3-8b": (QWEN3, 4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    "qwen3-14b": (QWEN3, 5120, 40, 40, 8, 128, 17408, 151936, False, 40960),
    "qwen3-32b": (QWEN3, 5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
    "mistral-7b": (MISTRAL, 4096, 32, 32, 8, 128, 14336, 32768, False, 32768),
    "mistral-small-24b": (MISTRAL, 5120, 40, 32, 8, 128, 32768, 131072, False, 32768),
    "phi-4": (PHI3, 5120, 40, 40, 10, 128, 17920, 100352, False, 16384),
    "mixtral-8x7b": (MIXTRAL, 4096, 32, 32, 8, 128, 14336, 32000, False, 32768),
    "qwen3-30b-a3b": (QWEN3_MOE, 2048, 48, 32, 4, 128, 6144, 151936, False, 40960),
}
_TYPES = {
    **{LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3", QWEN3_MOE: "qwen3_moe"},
    **{MISTRAL: "mistral", MIXTRAL: "mixtral", PHI3: "phi3"},
}
_EXPERTS = {
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_COLUMNS, ([row[0]], *row[1:]), strict=True), model_type=_TYPES[row[0]])
    | ({"attention_bias": True} if row[0] == QWEN2 else {})
    | _EXPERTS.get(name, {})
    for name, row in _DENSE.items()
}
_ENDINGS = re.compile(r"-(instruct|chat|base|it|hf|gguf|v0\.\d|2407|2409|2501|2507)$")


def shape_named(given: str) -> dict[str, Any] | None:
    """The config of a published model by its name, with or without its publisher ("meta-llama/Llama-3.3-70B-Instruct"),
    or by its size alone ("70b": the first of the table); None if it is not known."""
    name = given.rpartition("/")[2].lower()
    name = re.sub(r"^(meta-|qwen-)", "", name)
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    if name not in SHAPES and re.fullmatch(r"[\d.]+[bm]", name):
        name = next((known for known in SHAPES if known.endswith(f"-{name}")), name)
    return SHAPES.get(name)
