"""What a profile of a GPU's steps says, from events as torch's profiler gives them there."""

from __future__ import annotations

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from runtime.profile_shares import shares


def event(name, began_us, ended_us, *, on=DeviceType.CUDA, annotation=False):
    return FunctionEvent(
        id=0,
        name=name,
        thread=7,
        start_us=began_us,
        end_us=ended_us,
        use_device="cuda",
        device_type=on,
        is_user_annotation=annotation,
    )


def test_a_named_span_over_kernels_is_not_counted_beside_them():
    events = [
        event("Optimizer.step#AdamW.step", 0, 600_000, on=DeviceType.CPU, annotation=True),
        event("Optimizer.step#AdamW.step", 0, 600_000, annotation=True),
        event("nccl:all_reduce", 600_000, 800_000, annotation=True),
        event("multi_tensor_apply_kernel", 0, 600_000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 600_000, 800_000),
    ]
    found = shares(events, 1.0, "nccl")
    assert found["share"] == pytest.approx({"compute": 0.6, "communication": 0.2, "input": 0.0, "idle": 0.2})
    assert [row["name"] for row in found["operators"] if row["seconds"]] == [events[3].name, events[4].name]


@pytest.mark.parametrize(
    "kernel",
    [
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
)
def test_what_joins_the_gpus_of_an_engine_is_communication(kernel):
    found = shares([event(kernel, 0, 300_000), event("nvjet_tst_128x64", 300_000, 700_000)], 1.0, "nccl")
    assert found["share"] == pytest.approx({"compute": 0.4, "communication": 0.3, "input": 0.0, "idle": 0.3})
