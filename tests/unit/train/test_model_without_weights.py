"""A model built for a snapshot to fill is the loaded one in everything but the values of its parameters."""

import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.model.model import load_model
from train.state.publish import stored_names


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True)])
def test_only_the_values_of_parameters_are_left_out(tmp_path, family, tied):
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
def test_it_is_written_back_under_the_names_of_the_checkpoint(tmp_path, family):
    base = make_model_dir(tmp_path / "base", family=family)
    loaded, empty = (load_model(host_spec(base), weights=weights) for weights in (True, False))
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.named_parameters()}
    expected, found = (stored_names(model, shapes, base) for model in (loaded, empty))
    for name in shapes:
        assert found[name] == expected[name]
