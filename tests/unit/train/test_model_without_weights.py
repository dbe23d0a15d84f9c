"""A model built for a snapshot to fill is the loaded one in everything but the values of its parameters."""

import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.model.model import load_model


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

    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            parameter.copy_(dict(loaded.named_parameters())[name])
    ids = torch.arange(12)[None]
    for model in (loaded, empty):
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, empty(input_ids=ids).logits)
