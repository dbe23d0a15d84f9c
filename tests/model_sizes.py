"""Sizes of small models, under the names of transformers."""

from typing import Any

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def sizes(*given: int, **more: Any) -> dict[str, Any]:
    return dict(zip(NAMES, given, strict=True)) | more
