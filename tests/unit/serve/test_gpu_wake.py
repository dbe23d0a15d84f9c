"""What a GPU's engine writes again after a sleep that kept nothing, and forgets after its fork."""

from __future__ import annotations

import importlib
import sys
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from vllm import device_allocator
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.device_allocator import AllocationData
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
from vllm.model_executor.layers.fused_moe.experts.triton_cutlass_moe import TritonOrCutlassExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel, FusedMoEKernelModularImpl
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, make_nvfp4_moe_quant_config
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp8
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.models.qwen4_exp.nvidia.model_state import Qwen4ExpModelState
from vllm.scalar_type import scalar_types
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample import thinking_budget
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.workspace import WorkspaceManager

from serve.load.layerwise_load import load_layerwise
from serve.vllm import loose_tensors, shm_transfer
from serve.vllm.loose_tensors import MOST_BYTES, LooseTensors, spans_of_weights
from serve.vllm.patches import forget_devices
from serve.vllm.shm_loader import prefer_experts_in_parameters
from serve.vllm.shm_transfer import ShmUpdateInfo, ShmWeightTransferEngine
from serve.vllm.worker_extension import ShmWorkerExtension

IDS = {
    "reasoning_start_token_ids": [5],
    "natural_reasoning_end_token_ids": [7],
    "reasoning_end_token_ids": [6, 7],
}


class OnHost:
    def __init__(self, size, dtype):
        self.np = np.zeros(size, dtype=np.int32)

    def copy_to_uva(self):
        pass


def span(tensor):
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def kept(holder):
    return {name for name, value in vars(holder).items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def slept(monkeypatch):
    """Of a worker on whose device (named a GPU's, in the host's memory) vLLM's runner has made this: after a sleep that
    discarded these tensors, as a wake leaves them before it loads weights."""

    def sleep(model, lost, **of_runner):
        told = {first: AllocationData((0, size, first, 7), "weights") for first, size in map(span, lost)}
        monkeypatch.setattr(
            device_allocator, "get_mem_allocator_instance", lambda: SimpleNamespace(pointer_to_data=told)
        )
        worker = ShmWorkerExtension()
        worker.model_runner = SimpleNamespace(device=torch.device("cuda"), kv_caches=[], **of_runner)
        engine = worker.weight_transfer_engine = object.__new__(ShmWeightTransferEngine)
        engine._loose = LooseTensors(model)
        worker.shm_sleeping()
        for tensor in lost:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        engine.start_weight_update()

    return sleep


def test_a_woken_gpu_has_zeros_in_its_kv_cache():
    worker = ShmWorkerExtension()
    half = torch.full((2, 3, 16), float("nan"), dtype=torch.bfloat16)
    states = [torch.full((4,), float("nan")), torch.full((2, 8), 255, dtype=torch.uint8)]
    worker.model_runner = SimpleNamespace(device=torch.device("cuda"), kv_caches=[half.permute(1, 0, 2), states])
    worker.shm_woken()
    attention, states = worker.model_runner.kv_caches
    assert all(not tensor.float().any() and not tensor.float().isnan().any() for tensor in (attention, *states))
    worker.model_runner = SimpleNamespace(device=torch.device("cpu"), kv_caches=[torch.ones(3)])
    worker.shm_woken()
    assert worker.model_runner.kv_caches[0].all(), "on processors memory that is not written takes none"


def test_a_woken_gpu_knows_the_ids_that_end_thinking(slept, monkeypatch):
    monkeypatch.setattr(thinking_budget, "UvaBackedTensor", OnHost)
    requests = SimpleNamespace(max_num_reqs=4, device=torch.device("cpu"))
    sampler = object.__new__(Sampler)
    sampler.thinking_budget_state = budget = ThinkingBudgetState(requests, SimpleNamespace(**IDS))
    slept(torch.nn.Linear(4, 4), [getattr(budget, name) for name in kept(budget)], sampler=sampler)
    assert {name: getattr(budget, name).tolist() for name in IDS} == IDS


@pytest.mark.parametrize("most_bytes", [MOST_BYTES, 16])
def test_a_woken_gpu_has_valid_positions_for_tokens_that_only_fill_a_captured_batch(slept, monkeypatch, most_bytes):
    """Of Qwen2.5-VL and the like: a step of three tokens leaves the fourth row of the graph that it runs as it was. The
    inputs of most models are too large to be kept."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(loose_tensors, "MOST_BYTES", most_bytes)
    state = object.__new__(DefaultModelState)
    state.rope_state = RopeState(3, 2, 8, 16, torch.device("cpu"))
    state.encoder_runner = EncoderRunner(SimpleNamespace(), 8, 4, None, torch.bfloat16, torch.device("cpu"))
    lost = [getattr(holder, name) for holder in vars(state).values() for name in kept(holder)]
    assert len(lost) == 2
    slept(torch.nn.Linear(4, 4), lost, model_state=state)
    assert not any(tensor.any() for tensor in lost)


def test_a_woken_qwen4_exp_finds_the_tokens_before_each(slept, monkeypatch):
    """By how far back they stand, which the model's state keeps beside the weights."""
    monkeypatch.setattr(MambaHybridModelState, "__init__", lambda self, *_: vars(self).update(OF_QWEN4_EXP))
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    state = Qwen4ExpModelState(config, None, None, torch.device("cpu"))
    slept(torch.nn.Linear(4, 4), [getattr(state, name) for name in kept(state)], model_state=state)
    tokens = SimpleNamespace(gpu=torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]], dtype=torch.int32))
    requests = SimpleNamespace(all_token_ids=tokens, num_computed_tokens=SimpleNamespace(gpu=torch.tensor([3, 1])))
    batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.tensor([0, 1]))
    assert state._prepare_ngram_context(batch, requests)[:2].tolist() == [[12, 13], [9, 21]]


OF_QWEN4_EXP = {
    "max_num_reqs": 3,
    "device": torch.device("cpu"),
    "model_config": SimpleNamespace(
        hf_text_config=SimpleNamespace(ple_layer_ids=[1], ngram_size=3, eos_token_id=9),
    ),
}


def test_a_woken_qwen3_vl_adds_no_picture_to_a_text(slept):
    """Its first layers add what the last pictures left in a list (deepstack_input_embeds in vLLM's qwen3_vl.py), where
    nothing is written for a text."""
    model = torch.nn.Linear(4, 4)
    model.deepstack_input_embeds = [torch.zeros(8, 4) for _ in range(3)]
    model.register_buffer("frequencies", torch.ones(4))
    model.all_of_them = (model.frequencies,)
    slept(model, [*model.deepstack_input_embeds, model.weight.data])
    assert not any(added.any() for added in model.deepstack_input_embeds)
    assert model.frequencies.all() and model.weight.isnan().all(), "vLLM writes the one and the load the other"


def test_marlins_kernels_find_their_locks_open_after_a_sleep(slept, monkeypatch):
    """DeepSeek in 4 bits multiplies by them while it loads, so that the locks of all layers lie among the weights."""
    monkeypatch.setattr(workspace, "_manager", WorkspaceManager(torch.device("cpu")))
    monkeypatch.setattr(marlin_utils, "num_compute_units", lambda _: 4)
    locks = marlin_utils.get_marlin_workspace(torch.device("cpu"))
    assert locks.any() == 0 and marlin_utils.get_marlin_workspace(torch.device("cpu")) is locks
    slept(torch.nn.Linear(4, 4), [locks])
    assert not locks.any()


def test_slopes_that_lie_among_the_weights_come_back_and_nothing_else_is_written(monkeypatch):
    """The GPU's attention makes them as the processor's does. A version has no such tensor, and vLLM keeps buffers."""
    layer, slopes = torch.nn.Linear(4, 4), [0.5, 0.25, 0.125, 0.0625]
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    layer.impl = cpu_attn.CPUAttentionBackendImpl(4, 8, 1.0, 4, slopes, None, "auto")
    layer.mask, layer.kv_cache = torch.ones(3), torch.ones(5)
    layer.workspace = torch.ones(MOST_BYTES)
    lost = (layer.impl.alibi_slopes, layer.mask, layer.workspace, layer.weight)
    loose = LooseTensors(torch.nn.Sequential(layer))
    loose.keep([span(tensor) for tensor in lost], None)
    for tensor in (*lost, layer.kv_cache):
        tensor.data.fill_(float("nan"))
    loose.put_back()
    assert layer.impl.alibi_slopes is lost[0] and lost[0].tolist() == slopes and lost[1].tolist() == [1, 1, 1]
    assert layer.kv_cache.isnan().all() and layer.weight.isnan().all() and not layer.workspace.any()
    lost[0].zero_()
    loose.put_back()
    assert not lost[0].any(), "once: a load without a sleep finds them as they are"


@pytest.fixture
def lamport(monkeypatch):
    """The module of vLLM's by which MiniMax-M2's workers sum; what would lie on a GPU lies here, and nobody is met."""

    def here(make):
        return lambda *args, device, **named: make(*args, **named)

    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    sys.modules["cuda"].cudart = SimpleNamespace()
    module = importlib.import_module("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace")
    on_host = SimpleNamespace(zeros=here(torch.zeros), tensor=here(torch.tensor), int32=torch.int32, int64=torch.int64)
    monkeypatch.setattr(module, "torch", on_host)
    met = SimpleNamespace(local_ptr=0, serialize=lambda: [11, 12], cleanup=lambda: None)
    monkeypatch.setattr(module, "IpcBuffer", lambda *_: met)
    yield module
    del sys.modules[module.__name__]


def test_what_vllm_keeps_for_all_layers_comes_back_too(lamport):
    """How large a part of the common buffer is, and which is next: without them a woken MiniMax-M2 waits for ever."""
    norm = torch.nn.Linear(4, 4)
    norm.workspace = lamport.get_allreduce_workspace(0, 2, comm_size=4096)
    (held,) = lamport._workspace_cache.values()
    lost = {held._flag_buf: [0, 0, 2], held._layout_buf: [0, 4096], norm.workspace: norm.workspace.tolist()}
    held._flag_buf[2] = 2
    loose = LooseTensors(torch.nn.Sequential(norm))
    loose.keep([span(tensor) for tensor in lost], None)
    for tensor in lost:
        tensor.fill_(-1)
    loose.put_back()
    assert {tensor: tensor.tolist() for tensor in lost} == lost


class Said(SimpleNamespace):
    """A configuration of vLLM's, of which the rest is not said."""

    def __getattr__(self, name):
        return None


def fp8_kernel():
    """Of vLLM's for experts in FP8 on Hopper, which every load makes anew."""
    config = Said(num_local_experts=4, intermediate_size_per_partition=96, hidden_dim=64, device="cpu")
    experts = object.__new__(TritonOrCutlassExperts)
    experts.experts = CutlassExpertsFp8(config, Said(use_fp8_w8a8=True))
    kernel = object.__new__(FusedMoEKernel)
    kernel.impl = object.__new__(FusedMoEKernelModularImpl)
    kernel.impl.fused_experts = experts
    return kernel


def strides(kernel):
    experts = kernel.impl.fused_experts.experts
    return [experts.ab_strides1, experts.ab_strides2, experts.c_strides1]


def test_strides_that_captured_graphs_read_come_back_after_every_sleep_whatever_was_loaded_between():
    layer = torch.nn.Linear(4, 4)
    layer.quant_method = object.__new__(Fp8MoEMethod)
    layer.quant_method.moe_kernel = fp8_kernel()
    loose, graphs_read = LooseTensors(layer), strides(layer.quant_method.moe_kernel)
    for _ in range(2):
        loose.keep([span(tensor) for tensor in graphs_read], None)
        for tensor in graphs_read:
            tensor.fill_(-1)
        loose.put_back()
        assert [tensor.unique().tolist() for tensor in graphs_read] == [[64], [96], [192]]
        layer.quant_method.moe_kernel = fp8_kernel()


def test_captured_graphs_read_the_scales_of_the_version_that_was_loaded_last(monkeypatch):
    """Those of activations before experts in NVFP4 were the first version's, those behind them the last one's."""

    def made(scale):
        scales = [torch.full((4,), scale) for _ in range(6)]
        return make_nvfp4_moe_quant_config(NvFp4MoeBackend.VLLM_CUTLASS, *scales)

    layer = torch.nn.Linear(4, 4)
    layer.quant_method = object.__new__(ModelOptNvFp4FusedMoE)
    layer.quant_method.moe_quant_config = made(2.0)
    graphs_read, loose = layer.quant_method.moe_quant_config.a1_gscale, LooseTensors(layer)
    assert graphs_read.tolist() == [0.5] * 4
    engine = object.__new__(ShmWeightTransferEngine)
    engine.model, engine.model_config, engine.device, engine._loose = layer, None, torch.device("cuda"), loose
    engine._staging, engine.layerwise_reason = None, "its experts are in NVFP4"
    engine._open, engine._bytes_read, engine.drop_staged = lambda *_, **__: None, lambda _: 0, lambda: None
    for scale in (4.0, 8.0):
        reloaded = partial(setattr, layer.quant_method, "moe_quant_config", made(scale))
        monkeypatch.setattr(shm_transfer, "load_layerwise", lambda *_, reloaded=reloaded: reloaded())
        engine.receive_weights(ShmUpdateInfo("a version"))
        assert graphs_read.tolist() == [1 / scale] * 4
    layer.quant_method.moe_quant_config._a1.alpha_or_gscale = torch.ones(5)
    loose.follow(layer)
    assert graphs_read.tolist() == [1 / 8] * 4, "of another shape it is something else"


class LaidOut(QuantizeMethodBase):
    """Makes a layer's weights anew after each load: as a parameter, as most kernels' are, or as Triton's in MXFP4."""

    def __init__(self, *, wrapped):
        self.wrapped = wrapped

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError

    def apply(self, *args, **kwargs):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        made = 2 * layer.weight.data
        del layer.weight
        layer.weight = SimpleNamespace(data=made) if self.wrapped else torch.nn.Parameter(made, requires_grad=False)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_reload_writes_parameters_where_captured_graphs_read_them_and_nothing_else(wrapped):
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.requires_grad_(False).weight.fill_(1)
    record_metadata_for_reloading(layer)
    layer.quant_method = LaidOut(wrapped=wrapped)
    layer.quant_method.process_weights_after_loading(layer)
    graphs_read = layer.weight.data
    assert graphs_read.unique() == 2
    layer.load_weights = lambda named: [
        getattr(layer.weight, "weight_loader", default_weight_loader)(layer.weight, tensor) for _, tensor in named
    ]
    version = SimpleNamespace(tensors=lambda: iter([("weight", torch.full((4, 4), 3.0))]))
    load_layerwise(layer, SimpleNamespace(dtype=torch.float32), version, torch.device("cuda"))
    assert layer.weight.data.unique() == 6
    assert graphs_read.unique() == (2 if wrapped else 6), "if vLLM follows these too, prefer_experts_in_parameters goes"


class InFourBits(LaidOut):
    """A layer in 4 bits of AWQ or GPTQ, of which vLLM's kernel for GPUs before Hopper lays out the bias here alone."""

    def __init__(self, monkeypatch, out, into):
        monkeypatch.setattr(MarlinLinearKernel, "_transform_param", lambda *_: None)
        self.kernel = object.__new__(MarlinLinearKernel)
        self.kernel.config = MPLinearLayerConfig((into, out), (into, out), scalar_types.uint4b8, None, -1, False)
        self.kernel.w_q_name, self.kernel.w_s_name, self.kernel.w_zp_name = "weight", "weight", None

    def process_weights_after_loading(self, layer):
        self.kernel.process_weights_after_loading(layer)


def test_a_bias_that_a_kernel_lays_out_elsewhere_is_where_captured_graphs_read_it(monkeypatch):
    """Qwen2.5 in 4 bits: they went on reading the first one's memory, with the new bias in it as it is stored."""
    layer = torch.nn.Linear(128, 64).requires_grad_(False)
    record_metadata_for_reloading(layer)
    layer.quant_method = InFourBits(monkeypatch, 64, 128)
    layer.quant_method.process_weights_after_loading(layer)
    graphs_read, parameter = layer.bias.data, layer.bias
    layer.load_weights = lambda named: [
        getattr(tensor_of, "weight_loader", default_weight_loader)(tensor_of, tensor)
        for tensor_of, tensor in ((getattr(layer, name), tensor) for name, tensor in named)
    ]
    for _ in range(2):
        weight, bias = torch.rand(64, 128), torch.rand(64)
        version = SimpleNamespace(tensors=lambda weight=weight, bias=bias: iter([("weight", weight), ("bias", bias)]))
        load_layerwise(layer, SimpleNamespace(dtype=torch.float32), version, torch.device("cuda"))
        laid_out = marlin_utils.marlin_permute_bias(bias)
        assert not torch.equal(laid_out, bias)
        assert torch.equal(graphs_read, laid_out)
        assert layer.bias is parameter and parameter.data_ptr() == graphs_read.data_ptr()
        assert torch.equal(layer.weight, weight)


class InEightBits(LaidOut):
    """A layer in FP8 as vLLM's kernel for GPUs before Ada lays it out, its bias too; `in_four`: as in FP4."""

    def __init__(self, monkeypatch, *, in_four):
        self.in_four = in_four
        monkeypatch.setattr(marlin_utils_fp8.ops, "gptq_marlin_repack", lambda b_q_weight, **_: b_q_weight)

    def process_weights_after_loading(self, layer):
        layer.orig_dtype, layer.weight_scale = torch.bfloat16, torch.nn.Parameter(torch.ones(1), requires_grad=False)
        stored = layer.bias
        marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
        if self.in_four:  # as prepare_fp4_layer_for_marlin has it
            layer.bias = torch.nn.Parameter(as_marlin_has_it(stored), requires_grad=False)


def as_marlin_has_it(bias):
    return marlin_utils.marlin_permute_bias(pad(bias, (0, -len(bias) % 64)))


@pytest.mark.parametrize("head", [64, 24])  # 96 values are filled up to 128
@pytest.mark.parametrize("in_four", [False, True])
def test_a_version_is_loaded_where_a_kernel_replaced_the_bias_of_a_layer(monkeypatch, in_four, head):
    """Qwen2.5 in FP8 on an A100, in NVFP4 on Hopper: a wake failed at the first stored bias."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    with set_current_vllm_config(VllmConfig()):
        layer = QKVParallelLinear(128, head, 2, 1, params_dtype=torch.bfloat16, disable_tp=True)
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    record_metadata_for_reloading(layer)
    layer.quant_method = InEightBits(monkeypatch, in_four=in_four)
    layer.quant_method.process_weights_after_loading(layer)
    graphs_read = layer.bias.data
    model = torch.nn.ModuleDict({"qkv": layer})
    model.load_weights = lambda named: [
        (tensor_of := getattr(layer, name)).weight_loader(tensor_of, tensor, shard) for name, shard, tensor in named
    ]
    for _ in range(2):
        rows = {"q": 2 * head, "k": head, "v": head}
        biases = {shard: torch.rand(size).bfloat16() for shard, size in rows.items()}
        stored = [
            *(("weight", shard, torch.rand(size, 128).to(torch.float8_e4m3fn)) for shard, size in rows.items()),
            *(("bias", shard, bias) for shard, bias in biases.items()),
        ]
        version = SimpleNamespace(tensors=lambda stored=stored: iter(stored))
        load_layerwise(model, SimpleNamespace(dtype=torch.bfloat16), version, torch.device("cuda"))
        assert torch.equal(graphs_read, as_marlin_has_it(torch.cat([*biases.values()])))
        assert layer.bias.data_ptr() == graphs_read.data_ptr()


def test_what_a_model_makes_of_all_its_weights_is_made_again_after_each_load():
    """DeepSeek V4's first layer reads a sum over a weight, which vLLM makes after the first load alone."""
    model = torch.nn.Linear(4, 1, bias=False)
    model.requires_grad_(False).weight.fill_(1)
    record_metadata_for_reloading(model)
    graphs_read = model.weight.sum(dim=1)
    model.process_weights_after_loading = lambda: graphs_read.copy_(model.weight.sum(dim=1))
    model.load_weights = lambda named: [model.weight.weight_loader(model.weight, tensor) for _, tensor in named]
    version = SimpleNamespace(tensors=lambda: iter([("weight", torch.full((1, 4), 3.0))]))
    for device in (torch.device("cuda"), torch.device("cpu")):
        graphs_read.zero_()
        load_layerwise(model, SimpleNamespace(dtype=torch.float32), version, device)
        assert graphs_read.tolist() == [12]


def test_experts_in_mxfp4_go_to_kernels_that_keep_parameters(monkeypatch):
    """gpt-oss on Hopper and Blackwell: vLLM prefers Triton's there."""
    before = mxfp4._get_priority_backends_for_gpt_oss
    monkeypatch.setattr(mxfp4, "_get_priority_backends_for_gpt_oss", before)
    triton, *others = mxfp4.Mxfp4MoeBackend.TRITON, mxfp4.Mxfp4MoeBackend.MARLIN, mxfp4.Mxfp4MoeBackend.HUMMING
    assert all(before().index(triton) < before().index(other) for other in others), "else there is nothing to do"
    for _ in range(2):
        prefer_experts_in_parameters()
    after = mxfp4._get_priority_backends_for_gpt_oss()
    assert sorted(after, key=before().index) == before()
    assert all(after.index(triton) > after.index(other) for other in others)


def test_what_is_discarded_with_the_weights_is_what_vllms_allocator_says(monkeypatch):
    told = {
        1000: AllocationData((0, 64, 1000, 7), "weights"),
        2000: AllocationData((0, 32, 2000, 8), "kv_cache"),
    }
    allocator = SimpleNamespace(pointer_to_data=told)
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    assert spans_of_weights() == [(1000, 64)]


def test_an_engine_asks_anew_what_its_parent_was_told_about_another_gpu():
    told = [(9, 0)]

    class Platform:
        @classmethod
        @cache
        def get_device_capability(cls, device_id=0):
            return told[0]

    class Nvml(Platform):
        pass

    assert Nvml.get_device_capability() == (9, 0)
    told[0] = (8, 9)
    assert Nvml.get_device_capability() == (9, 0)
    forget_devices(Nvml)
    assert Nvml.get_device_capability() == (8, 9)
