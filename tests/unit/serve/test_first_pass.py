"""What layers of vLLM make of their weights in their first pass follows the version that was loaded last."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Linear, Module
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from serve.vllm import shm_transfer
from serve.vllm.shm_transfer import ShmUpdateInfo, ShmWeightTransferEngine
from tests.unit.serve.vllm_packages import unimported


class Enough(Exception):
    """The pass came to what it does with the weights."""


def enough(*_):
    raise Enough


@pytest.fixture
def glm5next(monkeypatch):
    """A module of the model, without the package's own import, which reads pictures by torchvision."""
    unimported(monkeypatch, "glm5next", "glm5next.common")
    return lambda name: importlib.import_module(f"vllm.models.glm5next.common.{name}")


def bare(kind, **attributes):
    layer = kind.__new__(kind)
    Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def indexer(glm5next, monkeypatch):
    attention = glm5next("attention")
    monkeypatch.setattr(attention, "_fused_indexer_k_norm", enough)

    class Projection(Linear):
        def forward(self, x):
            return super().forward(x), None

    projections = {"wq_b": Projection(4, 8), "wk_weights_proj": Projection(4, 6), "k_norm": torch.nn.LayerNorm(4)}
    layer = bare(attention.Indexer, head_dim=4, n_head=2, _wp_fp32=None, **projections)
    return layer, lambda: layer(torch.ones(1, 4), torch.ones(1, 4), None, None), "_wp_fp32"


def linear_attention(glm5next, monkeypatch):
    kda = glm5next("kda")
    metadata = GDNAttentionMetadata(0, 0, 0, 0, 0, 0, num_actual_tokens=1)
    context = SimpleNamespace(attn_metadata={"a layer": metadata})
    monkeypatch.setattr(kda, "get_forward_context", lambda: context)

    class Convolution(Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3, 1, 4))

        def __getattr__(self, name):
            return enough() if name == "bias" else super().__getattr__(name)

    convolutions = {f"{name}_conv1d": Convolution() for name in "qkv"}
    held = {"kda_safe_gate": True, "kda_lower_bound": 0.0, "_conv_state_dim_first": True, "_merged_conv_weight": None}
    caches = (torch.zeros(1), torch.zeros(1))
    layer = bare(kda.Glm5NextLinearAttention, prefix="a layer", kv_cache=caches, **held, **convolutions)
    return layer, lambda: layer._forward(*torch.zeros(4, 1, 1)), "_merged_conv_weight"


def experts(*_):
    layer = bare(MoERunner, gate=Linear(4, 3), shared_expert_gate=Linear(4, 1), _combined_gate_weight=None)

    def first_pass():
        layer._maybe_fuse_gate_weights()
        raise Enough

    return layer, first_pass, "_combined_gate_weight"


@pytest.mark.parametrize("of", [indexer, linear_attention, experts])
@pytest.mark.parametrize("layerwise", [None, "asked for"])
def test_what_a_first_pass_made_is_made_again_after_each_load_where_captured_graphs_read_it(
    of, layerwise, glm5next, monkeypatch
):
    layer, run, name = of(glm5next, monkeypatch)

    def first_pass():
        with torch.inference_mode(), pytest.raises(Enough):
            run()
        return getattr(layer, name)

    def load(*_):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.rand_like(parameter))

    engine = object.__new__(ShmWeightTransferEngine)
    engine.model, engine.model_config, engine.device, engine._loose = layer, None, torch.device("cuda"), None
    engine._staging, engine._direct, engine.layerwise_reason = None, SimpleNamespace(load=load), layerwise
    engine._open, engine._bytes_read, engine.drop_staged = lambda *_, **__: None, lambda _: 0, lambda: None
    engine._may_follow, engine._trace = False, None
    monkeypatch.setattr(shm_transfer, "load_layerwise", load)
    graphs_read = first_pass()
    for _ in range(2):
        engine.receive_weights(ShmUpdateInfo("a version"))
        assert first_pass() is graphs_read, "vLLM makes it once"
        setattr(layer, name, None)
        assert torch.equal(first_pass(), graphs_read)
        setattr(layer, name, graphs_read)
