import json

import pytest
import torch
from compressed_tensors.compressors import decompress_module
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train_support.tiny import make_model_dir
from train.convert.remake import FORMS, CannotRemake, merge, quantise
from train.model.quantised import keep_quantised


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("plain") / "model", hidden_size=128, intermediate_size=256)


@pytest.mark.parametrize("form, most_error", [("int8", 0.02), ("fp8", 0.05), ("int4", 0.2)])
def test_quantise_changes_linear_layers_only(plain, tmp_path, form, most_error):
    error = quantise(plain, tmp_path / "out", form)
    assert 0 < error < most_error
    before, after = load_file(plain / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])
    assert not any(
        "_proj." in name and tensor.dtype == torch.bfloat16 for name, tensor in after.items() if "scale" not in name
    )
    assert {path.name for path in plain.iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}


def test_quantise_unsupported_weights_are_refused(plain, tmp_path):
    quantise(plain, tmp_path / "int8", "int8")
    with pytest.raises(CannotRemake, match="already"):
        quantise(tmp_path / "int8", tmp_path / "again", "int8")
    with pytest.raises(CannotRemake, match="without --format merged"):
        merge(tmp_path / "int8", tmp_path / "adapter", tmp_path / "merged")
    narrow = make_model_dir(tmp_path / "narrow", hidden_size=48, intermediate_size=96)
    with pytest.raises(CannotRemake, match="int8 or fp8"):
        quantise(narrow, tmp_path / "int4", "int4")
    assert set(FORMS) == {"int8", "fp8", "int4"}


@pytest.mark.parametrize("form", FORMS)
def test_quantised_linear_matches_decoded_weights_and_gradients(tmp_path, form):
    made = make_model_dir(tmp_path / "made", family="qwen2", hidden_size=64, intermediate_size=96)  # groups of 32
    quantise(made, tmp_path / "base", form)
    model, as_stored, plain = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "base", "made")
    )
    keep_quantised(model)
    size = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    assert size < 0.65 * sum(p.numel() * p.element_size() for p in plain.model.layers.parameters())
    for name in ("q_proj", "o_proj"):  # with a bias and without
        layer, before = getattr(model.model.layers[0].self_attn, name), getattr(plain.model.layers[0].self_attn, name)
        weight = layer.decoded()
        decompress_module(stored := getattr(as_stored.model.layers[0].self_attn, name))
        assert torch.equal(weight, stored.weight)
        assert (weight - before.weight).norm() < 0.2 * before.weight.norm()
        inputs = torch.randn(3, 64, dtype=weight.dtype, requires_grad=True)
        result = layer(inputs)
        assert torch.equal(result, torch.nn.functional.linear(inputs, weight, before.bias))
        (gradient,) = torch.autograd.grad(result.sum(), inputs)
        assert torch.equal(gradient, torch.ones_like(result) @ weight)


def test_merge_keeps_dtype_of_base(plain, tmp_path):
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32),
        LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False),
    )
    lora.save_pretrained(tmp_path / "adapter")
    merge(plain, tmp_path / "adapter", tmp_path / "out")
    before, after = load_file(plain / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    layer = lora.get_submodule(f"base_model.model.{name}")
    added = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.equal(after[f"{name}.weight"], (before[f"{name}.weight"].float() + added).bfloat16())
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
