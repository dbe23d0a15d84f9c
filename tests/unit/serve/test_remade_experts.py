"""Experts that a model deleted after its first load take in the next version."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.models.utils import AutoWeightsLoader

from serve.load.layerwise_load import load_layerwise
from tests.unit.serve.vllm_packages import unimported

CONFIG = SimpleNamespace(
    embed_dim=4,
    pyramid_num_routed=[2],
    capacity_factor=1,
    router_scoring_func="sigmoid",
    router_scale=1.0,
    moe_intermediate_size=8,
    use_bias=False,
)


def cast(weight, **_):
    return weight.to(torch.float8_e4m3fn), weight[:1].float()


@pytest.fixture
def vision(monkeypatch):
    """vLLM's module, without what only its build for CUDA has."""
    unimported(monkeypatch, "dots3_note", "dots3_note.nvidia")
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", MagicMock(per_block_cast_to_fp8=cast))
    monkeypatch.setitem(sys.modules, "vllm.models.dots3_note.nvidia.vision_attention", MagicMock())
    name = "vllm.models.dots3_note.nvidia.vision"
    yield importlib.import_module(name)
    del sys.modules[name]


class Model(torch.nn.Module):
    def __init__(self, vision):
        super().__init__()
        self.mlp = vision.MoESwiGLUFFNFP8(CONFIG, 0).to(torch.bfloat16).requires_grad_(False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights)

    def process_weights_after_loading(self):
        self.mlp.process_weights_after_loading()

    def fused(self):
        return {name: tensor for name, tensor in self.named_buffers() if "fused" in name}


def test_dots3_makes_its_pictures_experts_of_every_version_where_captured_graphs_read_them(vision):
    versions = []
    for _ in range(3):
        model = Model(vision)
        version = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}
        model.load_weights(version.items())
        model.process_weights_after_loading()
        versions.append((version, model.fused()))
    graphs_read = model.fused()
    for version, made in versions:
        source = SimpleNamespace(tensors=lambda version=version: iter(version.items()))
        load_layerwise(model, SimpleNamespace(dtype=torch.bfloat16), source, torch.device("cpu"))
        assert not hasattr(model.mlp, "experts")
        for name, tensor in model.fused().items():
            assert tensor is graphs_read[name]
            assert torch.equal(tensor.float(), made[name].float())
        assert torch.equal(model.mlp.gate_weight, version["mlp.gate_weight"])


def test_after_an_error_dots3_keeps_what_it_made_and_takes_in_the_next_version(vision):
    model = Model(vision)
    version = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_weights(version.items())
    model.process_weights_after_loading()
    made = {name: tensor.float() for name, tensor in model.fused().items()}

    def torn():
        yield from [*version.items()][:2]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        load_layerwise(model, SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(tensors=torn), torch.device("cpu"))
    for _ in range(2):
        assert not hasattr(model.mlp, "experts")
        assert all(torch.equal(tensor.float(), made[name]) for name, tensor in model.fused().items())
        source = SimpleNamespace(tensors=lambda: iter(version.items()))
        load_layerwise(model, SimpleNamespace(dtype=torch.bfloat16), source, torch.device("cpu"))
