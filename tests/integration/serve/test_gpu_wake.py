"""A GPU engine's queries of its device at import and after its fork, and tensors that it restores after a sleep."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.cuda
from vllm import device_allocator
from vllm.device_allocator import AllocationData
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker import gpu_worker as gpu_worker_module
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from runtime.devices.kinds import kind_of
from serve.vllm import loose_tensors
from serve.vllm.loose_tensors import MOST_BYTES, LooseTensors
from serve.vllm.patches import forget_devices, with_device_at_import
from serve.vllm.worker import ShmGPUWorker


def span(tensor):
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def kept(holder):
    return {name for name, value in vars(holder).items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def slept(monkeypatch):
    """A function that puts a worker with this model and model runner to sleep, discards the tensors `lost` (in host
    memory in place of a GPU's), and wakes it up to the point before it loads weights."""

    def sleep(model, lost, **of_runner):
        allocations = {first: AllocationData((0, size, first, 7), "weights") for first, size in map(span, lost)}
        monkeypatch.setattr(
            device_allocator, "get_mem_allocator_instance", lambda: SimpleNamespace(pointer_to_data=allocations)
        )
        worker = gpu_worker(monkeypatch, LooseTensors(model), **of_runner)
        worker.sleep(level=2)
        for tensor in lost:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        worker.wake_up(["weights"])

    return sleep


def gpu_worker(monkeypatch, loose, **of_runner):
    for method in ("sleep", "wake_up"):
        monkeypatch.setattr(gpu_worker_module.Worker, method, lambda self, *_, **__: None)
    worker = object.__new__(ShmGPUWorker)
    worker.model_runner = SimpleNamespace(**{"kv_caches": [], **of_runner})
    worker._loose = loose
    return worker


def test_gpu_wake_zeroes_kv_cache(monkeypatch):
    half = torch.full((2, 3, 16), float("nan"), dtype=torch.bfloat16)
    states = [torch.full((4,), float("nan")), torch.full((2, 8), 255, dtype=torch.uint8)]
    worker = gpu_worker(monkeypatch, None, kv_caches=[half.permute(1, 0, 2), states])
    worker.wake_up(["kv_cache"])
    assert all(not tensor.float().any() and not tensor.float().isnan().any() for tensor in (half, *states))


@pytest.mark.parametrize("most_bytes", [MOST_BYTES, 16])
def test_gpu_wake_zeroes_rope_positions_of_padding(slept, monkeypatch, most_bytes):
    """As for Qwen2.5-VL: a step of three tokens does not write the fourth row of its captured graph. The inputs of most
    models exceed MOST_BYTES."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(loose_tensors, "MOST_BYTES", most_bytes)
    state = object.__new__(DefaultModelState)
    state.rope_state = RopeState(3, 2, 8, 16, torch.device("cpu"))
    state.encoder_runner = EncoderRunner(SimpleNamespace(), 8, 4, None, torch.bfloat16, torch.device("cpu"))
    lost = [getattr(holder, name) for holder in vars(state).values() for name in kept(holder)]
    assert len(lost) == 2
    slept(torch.nn.Linear(4, 4), lost, model_state=state)
    assert not any(tensor.any() for tensor in lost)


def test_gpu_wake_zeroes_deepstack_image_embeddings(slept):
    """Qwen3-VL's first layers add the embeddings of the last images (deepstack_input_embeds in vLLM's qwen3_vl.py),
    which a text does not overwrite."""
    model = torch.nn.Linear(4, 4)
    model.deepstack_input_embeds = [torch.zeros(8, 4) for _ in range(3)]
    model.register_buffer("frequencies", torch.ones(4))
    model.all_of_them = (model.frequencies,)
    slept(model, [*model.deepstack_input_embeds, model.weight.data])
    assert not any(added.any() for added in model.deepstack_input_embeds)
    assert model.frequencies.all() and model.weight.isnan().all(), "vLLM restores buffers, and the load weights"


def test_loose_tensors_restore_only_lost_small_tensors(monkeypatch):
    """ALiBi slopes, here of the CPU's attention, are in no version, and vLLM preserves only buffers."""
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
    assert not lost[0].any(), "only once: a load without a sleep restores nothing"


def test_loose_tensors_follow_copies_rebuilt_tensors():
    layer = torch.nn.Linear(4, 4)
    layer.impl = cpu_attn.CPUAttentionBackendImpl.__new__(cpu_attn.CPUAttentionBackendImpl)
    layer.impl.scales = graphs_read = torch.ones(4)
    loose = LooseTensors(layer)
    layer.impl.scales = torch.full((4,), 2.0)
    loose.follow(layer)
    assert graphs_read.tolist() == [2.0] * 4
    layer.impl.scales = torch.ones(5)
    loose.follow(layer)
    assert graphs_read.tolist() == [2.0] * 4, "a tensor of another shape is not copied"


def test_forget_devices_clears_cached_capability():
    capability = [(9, 0)]

    class Platform:
        @classmethod
        @cache
        def get_device_capability(cls, device_id=0):
            return capability[0]

    class Nvml(Platform):
        pass

    assert Nvml.get_device_capability() == (9, 0)
    capability[0] = (8, 9)
    assert Nvml.get_device_capability() == (9, 0)
    forget_devices(Nvml)
    assert Nvml.get_device_capability() == (8, 9)


triton = pytest.importorskip("triton")

H100 = SimpleNamespace(get_device_capability=lambda: (9, 0), get_device_name=lambda: "NVIDIA H100 80GB HBM3")
RTX_4090 = SimpleNamespace(get_device_capability=lambda: (8, 9), get_device_name=lambda: "NVIDIA GeForce RTX 4090")
ASKED = ("get_device_name", "get_device_capability", "device_count")


def asking(model):
    """The queries of vllm/third_party/flash_linear_attention/ops/utils.py at its import."""
    driver = triton.runtime.driver.active
    shared = [driver.utils.get_device_properties(i)["max_shared_mem"] for i in range(torch.cuda.device_count())]
    target = driver.get_current_target()
    return target.backend, target.arch, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(), shared


@pytest.mark.parametrize(
    ("platform", "answers"),
    [
        (H100, ("cuda", 90, "NVIDIA H100 80GB HBM3", (9, 0), [232448])),
        (RTX_4090, ("cuda", 89, "NVIDIA GeForce RTX 4090", (8, 9), [101376])),
    ],
)
def test_device_at_import_answers_without_starting_cuda(monkeypatch, platform, answers):
    started = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: started.append(True))
    before, driver = [getattr(torch.cuda, call) for call in ASKED], triton.runtime.driver._active
    assert with_device_at_import(asking, platform, kind_of("cuda"))(None) == answers
    assert not started
    assert [getattr(torch.cuda, call) for call in ASKED] == before
    assert triton.runtime.driver._active is driver
