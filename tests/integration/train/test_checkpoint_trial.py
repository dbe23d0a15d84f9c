"""Checkpoints held against the architecture of their config.json: names, shapes, tied heads, and tokenizers."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model_sizes import sizes
from train.convert.checkpoint_trial import Unfit, compare, compared, read

SHAPE = sizes(32, 64, 2, 4, 2, vocab_size=300, head_dim=8, pad_token_id=0)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
CLEAN = {"unchecked", "rows", "head", "embedding", "tied"}


def write(directory: Path, family: str = "llama", **more) -> dict[str, torch.Tensor]:
    config = AutoConfig.for_model(family, **SHAPE | EXPERTS | more)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def remarks(directory: Path, family: str = "llama") -> dict:
    found = compare(directory, ARCHS[family])
    assert not found["unchecked"]
    return {key: value for key, value in found.items() if value and key not in CLEAN}


@pytest.mark.parametrize("family", ARCHS)
def test_compare_saved_model_reports_no_difference(tmp_path, family):
    write(tmp_path, family)
    assert remarks(tmp_path, family) == {}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("q_proj", "q_proj.base_layer"),
        lambda name: name.replace("q_proj", "q_proj._fsdp_wrapped_module"),
        lambda name: name.removeprefix("model."),
    ],
    ids=["compiled", "peft", "peft within", "fsdp", "no prefix"],
)
def test_compare_wrapped_names_are_renamed(tmp_path, family, renamed):
    tensors = write(tmp_path, family)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    changed = {renamed(name): name for name in tensors if renamed(name) != name}
    assert remarks(tmp_path, family) == {"renamed": changed}


def test_compare_reports_missing_unknown_and_misshapen_tensors(tmp_path):
    tensors = write(tmp_path)
    del tensors["model.norm.weight"]
    tensors["v_head.summary.weight"] = torch.zeros(1, 32)
    tensors["lm_head.weight"] = torch.zeros(301, 32)
    tensors["module.model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 32)  # names an existing tensor
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # ignored by transformers
    save_file(tensors, tmp_path / "model.safetensors")
    assert remarks(tmp_path) == {
        "missing": ["model.norm.weight"],
        "unknown": ["module.model.layers.0.mlp.up_proj.weight", "v_head.summary.weight"],
        "shapes": [["lm_head.weight", [301, 32], [300, 32]]],
    }


def test_compare_tied_head_in_files_is_reported(tmp_path):
    tensors = write(tmp_path, tie_word_embeddings=True)
    head = {"lm_head.weight": torch.zeros(300, 32)}
    save_file(tensors | head, tmp_path / "model.safetensors")
    assert compare(tmp_path, "LlamaForCausalLM")["tied"] == [["lm_head.weight", "model.embed_tokens.weight"]]
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embedding}, tmp_path / "model.safetensors")
    assert remarks(tmp_path) == {"renamed": {"lm_head.weight": "model.embed_tokens.weight"}}


def test_compare_quantised_tensors_are_unchecked(tmp_path):
    tensors = write(tmp_path)
    packed = {f"{name}_packed": torch.zeros(4, dtype=torch.int32) for name in tensors}
    save_file(packed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "x"}}))
    found = compare(tmp_path, "LlamaForCausalLM")
    assert found["unchecked"] and found["rows"] == 300 and not found["renamed"]


def test_compare_quantisation_without_quantised_tensors_is_plain(tmp_path):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "x"}}))
    assert remarks(tmp_path) == {"plain": True}


@pytest.mark.parametrize(
    ("change", "unchecked"),
    [({"model_type": "not_yet_known"}, True), ({"hidden_size": 33}, False), ({"num_attention_heads": "4"}, False)],
)
def test_compare_changed_config_is_unfit_or_unchecked(tmp_path, change, unchecked):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    if unchecked:
        assert compare(tmp_path, "LlamaForCausalLM")["unchecked"]
        return
    try:
        found = compare(tmp_path, "LlamaForCausalLM")
    except Unfit:
        return
    assert found["shapes"]


def test_compared_failed_comparison_is_unchecked(tmp_path):
    write(tmp_path)
    with patch("train.convert.checkpoint_trial.get_model_conversion_mapping", side_effect=KeyError("x")):
        assert "failed to compare them: KeyError" in compared(tmp_path, "LlamaForCausalLM")["unchecked"]


def tokenizer(directory: Path, **settings) -> Path:
    letters = [*pre_tokenizers.ByteLevel.alphabet()]
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(sorted(letters))}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", **settings}))
    return directory


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_read_class_with_other_tokens_is_reported(tmp_path, name):
    found = read(tokenizer(tmp_path, tokenizer_class=name), 300)
    assert found["differs"] and found["mended"]


def test_read_family_with_own_class_is_not_mended(tmp_path):
    """transformers has a list of families, Qwen 2 among them, whose class it takes whatever the file names."""
    folder = tokenizer(tmp_path, tokenizer_class="LlamaTokenizerFast")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    body = json.loads((folder / "tokenizer.json").read_text())
    body["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(body))
    report = read(folder, 300)
    assert report["differs"] and report["class"] == "Qwen2Tokenizer" and not report["mended"]


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "NobodysTokenizerFast"])
def test_read_matching_class_reports_no_difference(tmp_path, name):
    found = read(tokenizer(tmp_path, tokenizer_class=name), 300)
    assert not found["differs"] and not found["beyond"]
    assert found["special"] == {"eos_token": ["<|end|>", 256]} and found["added"] == {"<|end|>": 256}


def test_read_tokens_beyond_embedding_have_ids_of_the_file(tmp_path):
    folder = tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    body = json.loads((folder / "tokenizer.json").read_text())
    body["added_tokens"].append({**body["added_tokens"][0], "content": "<|late|>", "id": 390})
    (folder / "tokenizer.json").write_text(json.dumps(body))
    assert read(folder, 300)["beyond"] == [["<|late|>", 390]]
    assert read(folder, 0)["beyond"] == []


def test_read_unreadable_generation_config_gives_the_reason(tmp_path):
    folder = tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    (folder / "generation_config.json").write_text(json.dumps({"cache_implementation": "nobody's"}))
    assert read(folder, 300)["generation"]
