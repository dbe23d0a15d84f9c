"""The estimates of speed against what others have published of their trainers.

Sources: torchtitan benchmarks, torchtune README and paper, MosaicML's llm-foundry benchmarking,
NVIDIA's dgxc recipes, Qwen README. Every third point is held back from calibration. Left out are compiled
models, and layouts that the trainer here does not have (pipelines, shared experts).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from runtime.devices.published import accelerator
from train.plan import speed
from train.plan.estimate import ModelShape
from train.plan.speed import Load

COLUMNS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
CONFIGS = {  # MPT's MLP has two matrices of four times the width: as many weights as three of 8/3
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

    power: of the device's rate, where its power limit is lower. rank: of the adapter, "" if all weights are trained.
    shared: states are shared out. recomputed: the part of the layers that is. base_bytes: of a weight.
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

    def tokens_per_s(self) -> float:
        device = accelerator(self.line["device"])
        assert device is not None
        device = device._replace(peak_flops=device.peak_flops * float(self.line["power"]))
        load = Load(self.row, self.row)
        step_s = speed.step_time(self.shape, self.fields, self.count, device, load=load).step_s
        tokens = self.row * self.micro
        return self.count * tokens / step_s


def points() -> Iterator[Point]:
    with open(Path(__file__).with_name("published_points.csv"), newline="") as file:
        for number, line in enumerate(csv.DictReader(file)):
            yield Point(line, held_back=number % 3 == 1)


def test_step_time_is_near_the_published_points_held_back():
    errors: dict[bool, list[float]] = {False: [], True: []}
    for point in points():
        errors[point.held_back].append(abs(point.tokens_per_s() / float(point.line["tokens_per_s"]) - 1))
    for held_back, found in errors.items():
        print(f"held back {held_back}: {median(found):.1%} in the median of {len(found)}")
        assert len(found) >= 7 and median(found) <= 0.2
