"""What an engine's memory depends on in a model: sizes that stand in its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from weights.format.foreign_json import size, text_part

QUANTISED = ("quantization_config", "compression_config")  # vllm/model_executor/model_loader/weight_utils.py


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Sizes are 0 where config.json does not tell them.

    stored_bytes: of the version's tensors as they are stored. quantized: they are served as they are stored, whatever
    the engine's dtype. layers: those that keep keys and values; latent: values that each keeps of a token where that is
    one latent vector (multi-head latent attention) and not `kv_heads` of `head_dim`. tied: the head uses the embedding.
    lora_sides: sum of in + out over the linear layers that engines take adapters on.
    """

    stored_bytes: int
    n_parameters: int = 0
    quantized: bool = False
    hidden: int = 0
    ffn: int = 0
    vocab: int = 0
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    tied: bool = False
    lora_sides: int = 0
    context: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], stored_bytes: int, n_parameters: int) -> ServedShape:
        """From a Hugging Face config.json; the text part of a multimodal model."""
        text = text_part(config)
        number = partial(size, text)
        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
        layers, width = number("num_hidden_layers", "n_layer"), number("intermediate_size", "n_inner")
        kv_heads = number("num_key_value_heads") or heads
        head_dim = number("head_dim") or (hidden // heads if heads else 0)
        kinds = text.get("layer_types")
        attending = layers
        if isinstance(kinds, list) and len(kinds) == layers:
            attending = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
        latent = number("kv_lora_rank")
        experts = number("num_local_experts", "num_experts", "n_routed_experts")
        active = number("num_experts_per_tok") * (number("moe_intermediate_size") or width) if experts else width
        sides = 2 * (hidden + heads * head_dim) + 2 * (hidden + kv_heads * head_dim) + 3 * (hidden + width)
        context = number("max_position_embeddings", "n_positions")
        return cls(
            stored_bytes,
            n_parameters,
            any(part.get(name) for part in (config, text) for name in QUANTISED),
            hidden,
            active,
            number("vocab_size"),
            attending,
            kv_heads,
            head_dim,
            latent + number("qk_rope_head_dim") if latent else 0,
            bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            layers * sides,
            context if 0 < context < 1 << 31 else None,
        )

    def kv_elements_per_token(self, tensor_parallel: int) -> int:
        """Numbers that one worker keeps of a token; 0 if config.json does not tell. Workers beyond the heads of keys
        and values keep copies."""
        if self.latent:
            return self.layers * self.latent
        return 2 * self.layers * max(1, self.kv_heads // tensor_parallel) * self.head_dim if self.kv_heads else 0
