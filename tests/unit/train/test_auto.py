"""Hyperparameters, "auto" and the allowed world sizes."""

import dataclasses
import json

import numpy as np
import pytest

from train.data.packing import StepPlan, plan_packs
from train.methods.preferences import Dpo
from train.plan import auto
from train.plan.auto import LEAST_STEPS, OF_LORA, SHORTEST_ROW, DatasetStats, ModelStats, allowed_sizes, resolve, steps
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.estimate import ModelShape
from train.plan.spec import TrainSpec

GSM8K = DatasetStats(7473, 1_200_000, 480)
SMALL, LARGE = ModelStats(ModelShape(5_000_000), 2048, "cpu"), ModelStats(ModelShape(7_000_000_000), 32768, "cuda")
SERVED = dataclasses.replace(SMALL, adapter_max_rank=32)
PACKED = dataclasses.replace(SERVED, quantised=True)
DENSE = dataclasses.replace(SMALL, shape=ModelShape(5_000_000, kv_heads=4, head_dim=64, queries=768))
CUTTABLE = dataclasses.replace(LARGE, shape=ModelShape(7_000_000_000, tensor_slices=8))
CUT_DENSE = dataclasses.replace(DENSE, shape=dataclasses.replace(DENSE.shape, tensor_slices=4))
MIXTURE = dataclasses.replace(LARGE, shape=ModelShape(7_000_000_000, tensor_slices=1))
PLACE = {"job_id": "j", "base_path": "b", "train_path": "t", "run_dir": "r", "shm_root": "s", "output_model": "o"}


@pytest.mark.parametrize("model", [SMALL, LARGE])
@pytest.mark.parametrize("data", [GSM8K, DatasetStats(10, 900, 100)])
def test_resolve_of_all_auto_returns_valid_spec(model, data):
    auto = dict.fromkeys(("n_epochs", "batch_size", "learning_rate_multiplier"), "auto")
    spec = TrainSpec(**PLACE, **resolve(auto, data, model, 8), device_kind="cpu")
    assert TrainSpec.from_dict(json.loads(spec.to_json())) == spec
    assert 1 in allowed_sizes(spec.batch_size, 8, spec.micro_batch)
    assert spec.full == (model is SMALL) and (8 in allowed_sizes(spec.batch_size, 8)) == (data is GSM8K)


MERGED = {"lora_publish": "merged"}
TOGETHER = {"sequence_parallel": 4, "max_length": 256}


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({"learning_rate_multiplier": 2, "learning_rate": 1e-4}, SMALL, {"learning_rate": 2e-4}),
        ({"lora_rank": 8}, SMALL, {"full": False, "lora_alpha": 16} | MERGED),
        ({"lora_targets": "q_proj, v_proj"}, SMALL, {"lora_targets": ("q_proj", "v_proj")}),
        ({"offload": "parameters"}, SMALL, {"zero_stage": 3}),
        ({"lora_rank": 8}, SERVED, {"lora_publish": "adapter"}),
        ({"lora_rank": 64} | MERGED, SERVED, MERGED),
        ({}, SERVED, {"full": True} | MERGED),
        (MERGED, SERVED, {"full": False}),
        ({"lora_rank": "auto", "full": True} | MERGED, SMALL, {"full": True}),
        ({}, PACKED, {"full": False, "lora_publish": "adapter"}),
        ({}, dataclasses.replace(LARGE, adapter_max_rank=8), {"lora_rank": 8, "lora_publish": "adapter"}),
        ({"micro_batch": 1024}, LARGE, {"batch_size": 8192}),  # above the allowed maximum
        (TOGETHER, DENSE, TOGETHER),
        ({"tensor_parallel": 2}, CUTTABLE, {"tensor_parallel": 2, "full": False, "zero_stage": 1}),
        ({}, CUTTABLE, {"tensor_parallel": 1}),
    ],
)
def test_resolve_fits_auto_values_to_given_values(given, model, expected):
    assert expected.items() <= resolve(given, GSM8K, model, 8).items()


@pytest.mark.parametrize(
    ("given", "param", "model"),
    [
        ({"n_epochs": 0}, "n_epochs", SMALL),
        ({"n_epochs": 2.5}, "n_epochs", SMALL),
        ({"batch_size": 10**400}, "batch_size", SMALL),
        ({"learning_rate_multiplier": float("nan")}, "learning_rate_multiplier", SMALL),
        ({"learning_rate_multiplier": 10_000}, "learning_rate_multiplier", SMALL),
        ({"learning_rate": 1}, "learning_rate", SMALL),
        ({"learning_rate": 1e-4, "learning_rate_multiplier": 10_000}, "learning_rate", SMALL),
        ({"lora_ranks": 8}, "lora_ranks", SMALL),
        ({"offload": "parameters", "zero_stage": 2}, "zero_stage", SMALL),
        ({"max_length": 4096}, "max_length", SMALL),
        ({"batch_size": 30, "micro_batch": 4}, "micro_batch", SMALL),
        *(({name: 0.5 if name == "lora_dropout" else 8, "full": True}, "full", SMALL) for name in OF_LORA[:3]),
        ({"lora_targets": ["q_proj"], "full": True}, "full", SMALL),
        ({"lora_rank": 33}, "lora_rank", SERVED),
        ({"lora_rank": 999}, "lora_rank", dataclasses.replace(SMALL, shape=ModelShape(5_000_000, hidden=576))),
        ({"lora_publish": "adapter"}, "lora_publish", SMALL),
        ({"full": True, "lora_publish": "adapter"}, "lora_publish", SERVED),
        ({"lora_targets": "q_proj, lm_head", "lora_publish": "adapter"}, "lora_publish", SERVED),
        ({"full": True}, "full", PACKED),
        ({"lora_publish": "merged"}, "lora_publish", PACKED),
        ({"lora_targets": ["lm_head"]}, "lora_publish", PACKED),
        ({}, "lora_publish", dataclasses.replace(PACKED, adapter_max_rank=0)),
        ({"tensor_parallel": 2}, "tensor_parallel", PACKED),
        ({"tensor_parallel": 3}, "tensor_parallel", CUTTABLE),
        ({"tensor_parallel": 16}, "tensor_parallel", CUTTABLE),
        ({"tensor_parallel": 2}, "tensor_parallel", MIXTURE),
        ({"tensor_parallel": 2, "lora_dropout": 0.1}, "lora_dropout", CUTTABLE),
        ({"sequence_parallel": 8}, "sequence_parallel", DENSE),  # heads
        ({"sequence_parallel": 3}, "sequence_parallel", DENSE),  # rows without packing
        ({"sequence_parallel": 2, "max_length": 63}, "sequence_parallel", DENSE),
        ({"sequence_parallel": 2}, "sequence_parallel", SMALL),  # unknown number of heads
        (TOGETHER | {"tensor_parallel": 2}, "sequence_parallel", CUT_DENSE),
        ({"kernels": "liger"}, "kernels", SMALL),  # on a CPU
    ],
)
def test_resolve_rejects_invalid_value_by_name(given, param, model):
    with pytest.raises(InvalidHyperparameter) as caught:
        resolve(given, GSM8K, model, 8)
    assert caught.value.param == param and caught.value.expected


@pytest.mark.parametrize("micro_batch, devices, rows", [(1, 8, 64), (4, 8, 64), (4, 6, 64), (16, 8, 128), (4, 1, 64)])
def test_resolve_rounds_auto_batch_size_to_micro_batch(micro_batch, devices, rows):
    fields = resolve({"micro_batch": micro_batch}, DatasetStats(200_000, 120_000_000, 3000), LARGE, devices)
    assert fields["batch_size"] == rows


def test_allowed_sizes_share_whole_micro_batches():
    assert allowed_sizes(12, 8) == [1, 2, 3, 4, 6]
    assert allowed_sizes(12, 8, 4) == [1, 3]
    assert allowed_sizes(12, 8, 1, 2) == [2, 4, 6, 8] and allowed_sizes(2, 8, 1, 2) == [2, 4]
    assert allowed_sizes(8, 3, 1, 4) == []


@pytest.mark.parametrize("field, value", [("zero_stage", "2"), ("colour", 1)])
def test_spec_rejects_unknown_fields_and_types(field, value):
    good = dataclasses.asdict(TrainSpec(**PLACE, device_kind="cpu"))
    with pytest.raises(InvalidSpec, match=field):
        TrainSpec.from_dict(good | {field: value})


TINY_DATA = DatasetStats(64, 3_245, 58)
REAL = ModelStats(ModelShape(134_500_000), 8192, "cpu")


def test_resolve_small_job_keeps_steps_and_tokens_on_more_devices():
    alone, wide = resolve({}, TINY_DATA, REAL, 1), resolve({}, TINY_DATA, REAL, 8)
    assert allowed_sizes(alone["batch_size"], 8) == [1] and allowed_sizes(wide["batch_size"], 8) == [1, 2]
    assert alone["batch_size"] * alone["max_length"] == wide["batch_size"] * wide["max_length"]
    assert steps(TINY_DATA, alone) == steps(TINY_DATA, wide) >= LEAST_STEPS
    assert wide["max_length"] >= max(SHORTEST_ROW, TINY_DATA.longest_example_tokens)


@pytest.mark.parametrize("sequences", [1, 2])
def test_steps_of_plan_equal_steps_of_run(sequences):
    lengths = [280, 280, 150, 300, 90, 270, 260, 290, 40, 310] * 6
    data = DatasetStats(60, sequences * sum(lengths), 310, tuple(sequences * length for length in lengths))
    rows = Dpo().rows(data) if sequences == 2 else data
    for given in ({"max_length": 512, "n_epochs": 3, "batch_size": 4}, {}, {"packing": False}):
        fields = resolve(given, rows, REAL, 8)
        packs = plan_packs(np.array(lengths), fields["max_length"], packing=fields["packing"])
        run = StepPlan(len(packs), fields["batch_size"], 1, fields["n_epochs"], 0)
        assert steps(rows, fields) == run.total_steps
    half = dataclasses.replace(rows, lengths=rows.lengths[:30])
    assert steps(half, fields) == steps(rows, fields), "some examples stand for all"


def test_resolve_max_length_fits_longest_example_unless_given():
    long = DatasetStats(64, 20_000, 700)
    assert resolve({}, long, REAL, 8)["max_length"] >= 700
    assert resolve({"max_length": 512}, TINY_DATA, REAL, 8)["max_length"] == 512
    asked = resolve({"batch_size": 1}, TINY_DATA, REAL, 8)
    assert (asked["batch_size"], asked["max_length"]) == (1, 256)
    assert resolve({"packing": False}, TINY_DATA, REAL, 8)["max_length"] == 512


@pytest.mark.parametrize("model", [REAL, LARGE])
@pytest.mark.parametrize("examples", [64, 1000, 50_000])
def test_resolve_gives_enough_steps_for_any_data_size(model, examples):
    data = DatasetStats(examples, 200 * examples, 400)
    fields = resolve({}, data, model, 8)
    assert steps(data, fields) >= LEAST_STEPS, fields


@pytest.mark.parametrize(
    ("parameters", "full", "lowest", "highest"),
    [
        (8e9, True, 5e-6, 3e-5),  # Tulu 3 5e-6, torchtune and TRL 2e-5
        (8e9, False, 9e-5, 3e-4),  # unsloth 2e-4, torchtune and Tinker 3e-4
        (70e9, True, 3e-6, 2e-5),
        (70e9, False, 5e-5, 3e-4),
        (1e9, False, 1.5e-4, 1e-3),
    ],
)
def test_peak_rate_lies_within_published_range(parameters, full, lowest, highest):
    for tokens in (100, 8192, 77_000, 10**6):
        assert lowest <= auto.peak_rate(parameters, tokens, full=full) <= highest


def test_epochs_increase_for_few_rows():
    for full in (True, False):
        passes = [auto.epochs(rows, full=full) for rows in (1, 12, 31, 60, 100, 150, 199, 200, 2000, 20_000)]
        assert passes == sorted(passes, reverse=True) and passes[-4:] == [5, 3, 2, 1]
        assert all(rows * auto.epochs(rows, full=full) <= 1000 for rows in (1, 31, 60, 100, 199))
    assert auto.epochs(31, full=False) > auto.epochs(31, full=True) > 5
