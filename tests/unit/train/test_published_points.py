"""Estimates of memory and speed, compared with published measurements of other trainers.

Sources: prime-rl BENCHMARKS.md, torchtitan benchmarks, torchtune README and paper, MosaicML's llm-foundry benchmarking,
NVIDIA's dgxc recipes, Qwen README. Every third point is held back from calibration. Omitted:
speeds of unsupported layouts (pipelines, shared experts) and of runs that write all weights to disk in each step, and
torchtitan's peaks, which include its allocator's cache.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest

from runtime.devices.kinds import accelerator
from train.plan import estimate
from train.plan.estimate import FRAGMENTS, Load, ModelShape

GIB = 2**30
FUSED_TRAFFIC = 1.2  # bytes of memory traffic of compiled kernels per saved byte of a layer
COMPILED_KEEPS = 0.7
"""The share of a layer's activations that fused kernels keep: 0.63 to 0.82 was measured."""
FP32_FLOPS = {"A100": 19.5e12, "H100": 67e12, "H200": 67e12, "4090": 82e12}
COLUMNS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
CONFIGS = {  # MPT's MLP has two matrices of 4 times the width: as many weights as three of 8/3 times
    "qwen3-0.6b": ((1024, 28, 16, 8, 128, 3072, 151936), 0.596e9, {"model_type": "qwen3", "tie_word_embeddings": True}),
    "qwen3-4b": ((2560, 36, 32, 8, 128, 9728, 151936), 4.02e9, {"model_type": "qwen3", "tie_word_embeddings": True}),
    "qwen3-30b-a3b": (
        (2048, 48, 32, 4, 128, 6144, 151936),
        30.53e9,
        {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "llama-3.2-3b": ((3072, 28, 24, 8, 128, 8192, 128256), 3.21e9, {"tie_word_embeddings": True}),
    "llama-3.1-8b": ((4096, 32, 32, 8, 128, 14336, 128256), 8.03e9, {}),
    "llama-3.1-405b": ((16384, 126, 128, 8, 128, 53248, 128256), 405.85e9, {}),
    "qwen-1.8b": ((2048, 24, 16, 16, 128, 5504, 151936), 1.84e9, {}),
    "qwen-7b": ((4096, 32, 32, 32, 128, 11008, 151936), 7.72e9, {}),
    "mpt-7b": ((4096, 32, 32, 32, 128, 10923, 50432), 6.66e9, {"tie_word_embeddings": True}),
    "mpt-13b": ((5120, 40, 40, 40, 128, 13653, 50432), 12.85e9, {"tie_word_embeddings": True}),
    "mpt-30b": ((7168, 48, 64, 64, 112, 19115, 50432), 29.98e9, {"tie_word_embeddings": True}),
}


class Point:
    """One line of the table.

    power: fraction of the device's rate under a lower power limit. rank: adapter rank, "" for full training. shared:
    states are sharded. recomputed: fraction of recomputed layers. head: "chunks", "wide" (float32 chunks) or "whole"
    with `logit_bytes` per logit. base_bytes: per weight. state_bytes: other bytes per trained weight.
    """

    def __init__(self, line: dict[str, str], held_back: bool):
        self.line, self.held_back = line, held_back
        sizes, count, more = CONFIGS[line["model"]]
        config = dict(zip(COLUMNS.split(), sizes, strict=True)) | more
        base = float(line["base_bytes"])
        shape = ModelShape.from_config(config, int(count))
        self.shape = replace(shape, quantised_bytes=base) if base < 1 else shape
        self.count, self.micro, self.row = (int(line[name]) for name in ("count", "micro_batch", "row_tokens"))
        self.fields: dict[str, Any] = {
            "full": not line["rank"],
            "lora_rank": int(line["rank"] or 0),
            "precision": "bf16",
            "offload": "none",
            "zero_stage": 3 if line["shared"] == "1" else 1,
            "activation_checkpointing": float(line["recomputed"]),
            "micro_batch": self.micro,
            "max_length": self.row,
            "batch_size": self.micro * self.count,
            "device_kind": "cuda",
        }

    def bytes(self) -> float:
        shape, line, base = self.shape, self.line, float(self.line["base_bytes"])
        trained = estimate.trained_parameters(shape, self.fields)
        held = shape.base_bytes(2) if base < 1 else base * shape.n_parameters
        held += float(line["state_bytes"]) * trained
        if line["shared"] == "1":  # two layers and the head are gathered at a time
            layer = (shape.n_parameters - shape.outside) / shape.layers
            held = held / self.count + 2 * min(base, 2) * layer + 2 * shape.vocab * shape.hidden
        of_tokens = estimate.rank_memory(shape, self.fields | {"full": False}, 1).activations_bytes
        if line["compiled"] == "1" and line["recomputed"] == "0":
            of_tokens *= COMPILED_KEEPS
        logits = float(line["logit_bytes"]) * self.micro * self.row * shape.vocab
        return (held + of_tokens + logits) * (1 + FRAGMENTS)

    def tokens_per_s(self) -> float:
        device = accelerator(self.line["device"])
        assert device is not None
        device = device._replace(peak_flops=device.peak_flops * float(self.line["power"]))
        load = Load(self.row, self.row)
        with patch.object(estimate, "TRAFFIC", FUSED_TRAFFIC if self.line["compiled"] == "1" else estimate.TRAFFIC):
            step_s = estimate.step_time(self.shape, self.fields, self.count, device, load=load).step_s
        tokens = self.row * self.micro
        if self.line["head"] == "wide":
            rate = next(flops for name, flops in FP32_FLOPS.items() if name in self.line["device"])
            head = 2 * (3 if self.fields["full"] else 2) * self.shape.vocab * self.shape.hidden
            step_s += tokens * head * (1 / rate - 1 / device.peak_flops)
        return self.count * tokens / step_s


def points() -> Iterator[Point]:
    with open(Path(__file__).with_name("published_points.csv"), newline="") as file:
        for number, line in enumerate(csv.DictReader(file)):
            yield Point(line, held_back=number % 3 == 1)


@pytest.mark.parametrize("what, most", [("bytes", 0.1), ("tokens_per_s", 0.2)])
def test_estimate_matches_held_back_published_points(what, most):
    errors: dict[bool, list[float]] = {False: [], True: []}
    for point in points():
        published = point.line["peak_gib" if what == "bytes" else "tokens_per_s"]
        if published:
            estimated = point.bytes() / GIB if what == "bytes" else point.tokens_per_s()
            errors[point.held_back].append(abs(estimated / float(published) - 1))
    for held_back, found in errors.items():
        print(f"{what}, held back {held_back}: {median(found):.1%} in the median of {len(found)}")
        assert len(found) >= 10 and median(found) <= most
