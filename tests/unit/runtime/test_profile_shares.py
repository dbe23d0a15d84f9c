"""Where the time of profiled steps went, by events as torch's profiler makes them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from runtime.profile_shares import INPUT, shares


def event(name: str, start_us: float, end_us: float, *, thread: int = 1, **fields: Any) -> FunctionEvent:
    return FunctionEvent(1, name, thread, start_us, end_us, use_device="cuda", **fields)


def on_device(name: str, start_us: float, end_us: float, **fields: Any) -> FunctionEvent:
    return event(name, start_us, end_us, device_type=DeviceType.CUDA, **fields)


def test_of_a_device_kernels_count_and_the_ranges_around_them_do_not():
    found = shares(
        [
            event("aten::mm", 0, 10),
            event(INPUT, 10, 20),
            on_device("ampere_bf16_gemm", 0, 400),
            on_device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 600),
            on_device("nccl:all_reduce", 400, 600, is_user_annotation=True),
            on_device("multi_tensor_apply_kernel", 600, 700),
            on_device("Optimizer.step#AdamW.step", 600, 700, is_user_annotation=True),
            on_device("Memcpy HtoD (Pageable -> Device)", 700, 710),
            on_device(INPUT, 700, 710, is_user_annotation=True),
        ],
        1e-3,
        "nccl",
    )
    assert found["share"] == pytest.approx({"compute": 510e-6, "communication": 200e-6, "input": 10e-6, "idle": 280e-6})
    assert {row["name"]: row["kind"] for row in found["operators"]} == {
        "ampere_bf16_gemm": "compute",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "multi_tensor_apply_kernel": "compute",
        "Memcpy HtoD (Pageable -> Device)": "compute",
        INPUT: "input",
    }


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
    found = shares([on_device(kernel, 0, 300_000), on_device("nvjet_tst_128x64", 300_000, 700_000)], 1.0, "nccl")
    assert found["share"] == pytest.approx({"compute": 0.4, "communication": 0.3, "input": 0.0, "idle": 0.3})
