"""Tiny GGUF files, written with the `gguf` package like llama.cpp's converter for transformers models."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model_sizes import sizes

VOCABULARY = 64
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHAPE = sizes(32, 64, 2, 4, 2, vocab_size=VOCABULARY, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5)
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# transformers' family name -> (llama.cpp's name, extra configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("llama", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"tie_word_embeddings": False, "sliding_window": None}),
    "gemma2": ("gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("gemma3", {"sliding_window": 64, "query_pre_attn_scalar": 8}),
}


def model(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family][1] | more)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # norms of all ones would hide a lost offset
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


def write(path: Path, made: Any, family: str, blocks: int | None = None, **fields: Any) -> Path:
    """Write a GGUF file. blocks: number of blocks with tensors. fields: more header strings or tensors."""
    arch = FAMILIES[family][0]
    config = made.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _tokenizer(writer)
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    for name, value in fields.items():
        if name not in tensors:
            writer.add_string(name, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), blocks or config.num_hidden_layers)
    for name, tensor in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            # llama.cpp rotates neighbouring elements, transformers rotates halves.
            tensor = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and "norm" in stem:
            tensor = tensor + 1
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.contiguous().numpy())
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<pad>", "<bos>", "<eos>", *(chr(ord("!") + n) for n in range(VOCABULARY - 4)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token.replace("ab", "AB") if token == "ab" else token for token in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["A B"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
