"""Adapters on disk are peft's own, and a model built for a snapshot is the loaded one but for its parameters."""

import json

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.model.model import config_json, is_factor, load_model, merge_into, stored_name
from train.plan.errors import UnsupportedModel
from train.state.publish import stored_names


@pytest.fixture
def trained(tmp_path):
    """(base directory, a peft model on it with random factors)."""
    base = make_model_dir(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return base, model


def test_adapter_names_and_config_load_in_peft(trained, tmp_path):
    base, model = trained
    names = [n.removeprefix("base_model.model.") for n, _ in model.named_parameters() if is_factor(n)]
    model.save_pretrained(tmp_path / "peft")
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "adapter_config.json").write_bytes(config_json(model.peft_config["default"], "starter"))
    read = PeftConfig.from_pretrained(str(ours))
    assert (read.r, read.lora_alpha, set(read.target_modules)) == (4, 16, {"q_proj", "down_proj"})
    assert json.loads((ours / "adapter_config.json").read_text())["base_model_name_or_path"] == "starter"
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as stored:
        assert {stored_name(name) for name in names} == set(stored.keys())


def test_merge_into_equals_merge_of_peft(trained, tmp_path):
    base, model = trained
    model.save_pretrained(tmp_path / "a")
    plain = dict(load_model(host_spec(base, precision="fp32")).named_parameters())
    ours = dict(load_model(host_spec(base, precision="fp32", base_adapter=str(tmp_path / "a"))).named_parameters())
    moved = "model.layers.0.self_attn.q_proj.weight"
    assert (ours[moved] - plain[moved]).abs().max() > 0.01
    for name, weight in model.merge_and_unload().named_parameters():
        assert torch.allclose(weight, ours[name], atol=1e-6), name


@pytest.mark.parametrize(
    "layer, settings",
    [("x", {}), ("model.layers.0.self_attn.q_proj", {}), (None, {"use_dora": True})],
    ids=["unknown layer", "other shape", "dora"],
)
def test_merge_into_unfit_adapter_is_refused(trained, tmp_path, layer, settings):
    base, model = trained
    model.save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | settings))
    if layer is not None:
        stray = {f"base_model.model.{layer}.lora_{part}.weight": torch.zeros(2, 2) for part in "AB"}
        save_file(stray, tmp_path / "a" / "adapter_model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match="adapter"):
        merge_into(plain, str(tmp_path / "a"))


def test_merge_into_ignores_layers_named_in_config(trained, tmp_path):
    base, model = trained
    model.save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    config |= {"megatron_config": {"a": 1}, "megatron_core": "nowhere", "init_lora_weights": False}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    merged = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merge_into(merged, str(tmp_path / "a"))
    for expected, weight in zip(model.merge_and_unload().parameters(), merged.parameters(), strict=True):
        assert torch.allclose(expected, weight, atol=1e-6)


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True)])
def test_model_without_weights_equals_loaded_one_otherwise(tmp_path, family, tied):
    base = make_model_dir(tmp_path / "base", family=family, tied=tied)
    spec = host_spec(base)
    loaded, empty = load_model(spec), load_model(spec, weights=False)
    assert {(n, p.shape, p.dtype) for n, p in loaded.named_parameters()} == {
        (n, p.shape, p.dtype) for n, p in empty.named_parameters()
    }
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    assert all(p.requires_grad for p in empty.parameters()) and empty.training and not empty.config.use_cache
    assert empty.generation_config.to_dict() == loaded.generation_config.to_dict()

    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            parameter.copy_(dict(loaded.named_parameters())[name])
    ids = torch.arange(12)[None]
    for model in (loaded, empty):
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, empty(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_model_without_weights_has_stored_names(tmp_path, family):
    base = make_model_dir(tmp_path / "base", family=family)
    loaded, empty = (load_model(host_spec(base), weights=weights) for weights in (True, False))
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.named_parameters()}
    expected, found = (stored_names(model, shapes, base) for model in (loaded, empty))
    for name in shapes:
        assert found[name] == expected[name]
