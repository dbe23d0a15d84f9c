"""Hyperparameters, "auto" and the allowed world sizes."""

import dataclasses
import json

import numpy as np
import pytest

from train.data.packing import StepPlan, plan_packs
from train.methods.dpo import Dpo
from train.plan.auto import LEAST_STEPS, SHORTEST_ROW, DatasetStats, ModelStats, allowed_sizes, resolve, steps
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.spec import TrainSpec

GSM8K = DatasetStats(7473, 1_200_000, 480)
SMALL, LARGE = ModelStats(5_000_000, 2048, device_kind="cpu"), ModelStats(7_000_000_000, 32768, "cuda")
PLACE = {"job_id": "j", "base_path": "b", "train_path": "t", "run_dir": "r", "shm_root": "s", "output_model": "o"}


def test_everything_auto_gives_a_spec():
    for model in (SMALL, LARGE):
        for data in (GSM8K, DatasetStats(10, 900, 100)):
            auto = dict.fromkeys(("n_epochs", "batch_size", "learning_rate_multiplier"), "auto")
            fields = resolve(auto, data, model, 8)
            spec = TrainSpec(**PLACE, **fields, device_kind="cpu")
            assert TrainSpec.from_dict(json.loads(spec.to_json())) == spec
            assert 1 in allowed_sizes(spec.batch_size, 8, spec.micro_batch)
    assert resolve({}, GSM8K, SMALL, 8)["full"] and not resolve({}, GSM8K, LARGE, 8)["full"]
    assert 8 in allowed_sizes(resolve({}, GSM8K, SMALL, 8)["batch_size"], 8)
    large = resolve({}, GSM8K, LARGE, 8)["learning_rate"]
    assert 1e-4 < large < 3e-4, "by the tokens of a step (train.plan.recipe)"


def test_numbers_and_extras_pass_through():
    given = {"batch_size": 12, "learning_rate_multiplier": 2, "learning_rate": 1e-4, "lora_rank": 8, "zero_stage": 3}
    more = {"offload": "parameters", "max_length": 256, "lora_targets": "q_proj, v_proj"}
    fields = resolve(given | more, GSM8K, SMALL, 4)
    assert fields["learning_rate"] == 2e-4 and not fields["full"] and fields["lora_alpha"] == 16
    assert fields["lora_targets"] == ("q_proj", "v_proj") and fields["batch_size"] == 12
    assert (fields["zero_stage"], fields["offload"], fields["max_length"]) == (3, "parameters", 256)


@pytest.mark.parametrize(
    ("name", "value"), [("lora_rank", 8), ("lora_alpha", 4), ("lora_dropout", 0.1), ("lora_targets", ["q_proj"])]
)
def test_what_adapters_alone_have_asks_for_one_and_is_refused_beside_every_weight(name, value):
    assert not resolve({name: value}, GSM8K, SMALL, 8)["full"]
    with pytest.raises(InvalidHyperparameter, match=name):
        resolve({name: value, "full": True}, GSM8K, SMALL, 8)
    assert resolve({name: "auto", "full": True, "lora_publish": "merged"}, GSM8K, SMALL, 8)["full"]


def test_lora_publishes_an_adapter_where_engines_take_it():
    served = dataclasses.replace(SMALL, adapter_max_rank=32)
    assert resolve({"lora_rank": 8}, GSM8K, served, 8)["lora_publish"] == "adapter"
    asked = {"lora_rank": 64, "lora_publish": "merged"}
    assert resolve(asked, GSM8K, served, 8)["lora_publish"] == "merged"
    assert resolve({"lora_rank": 8}, GSM8K, SMALL, 8)["lora_publish"] == "merged"
    assert resolve({}, GSM8K, served, 8)["lora_publish"] == "merged"  # full
    merged = resolve({"lora_publish": "merged"}, GSM8K, served, 8)
    assert merged["lora_publish"] == "merged" and not merged["full"]
    for given, model in (
        ({"lora_rank": 64}, served),
        ({}, SMALL),
        ({"full": True}, served),
        ({"lora_targets": "q_proj, lm_head"}, served),
    ):
        with pytest.raises(InvalidHyperparameter):
            resolve(given | {"lora_publish": "adapter"}, GSM8K, model, 8)


def test_quantised_weights_train_adapters_alone():
    packed = dataclasses.replace(SMALL, adapter_max_rank=32, quantised=True)
    fields = resolve({}, GSM8K, packed, 8)
    assert not fields["full"] and fields["lora_publish"] == "adapter"
    for given in ({"full": True}, {"lora_publish": "merged"}, {"tensor_parallel": 2}, {"lora_targets": ["lm_head"]}):
        with pytest.raises(InvalidHyperparameter):
            resolve(given, GSM8K, packed, 8)
    with pytest.raises(InvalidHyperparameter):
        resolve({}, GSM8K, dataclasses.replace(packed, adapter_max_rank=0), 8)


def test_ranks_share_rows_whose_tokens_and_heads_they_divide():
    dense = dataclasses.replace(SMALL, heads=(12, 4))
    fields = resolve({"sequence_parallel": 4, "max_length": 256}, GSM8K, dense, 8)
    assert fields["sequence_parallel"] == 4 and allowed_sizes(fields["batch_size"], 8, 1, 4)[0] == 4
    for given, model in (
        ({"sequence_parallel": 8}, dense),  # heads
        ({"sequence_parallel": 3}, dense),  # rows without packing
        ({"sequence_parallel": 2, "max_length": 63}, dense),
        ({"sequence_parallel": 2}, SMALL),  # heads are not known
        ({"sequence_parallel": 2, "tensor_parallel": 2}, dataclasses.replace(dense, tensor_slices=4)),
    ):
        with pytest.raises(InvalidHyperparameter) as caught:
            resolve(given, GSM8K, model, 8)
        assert caught.value.param == "sequence_parallel"
    with pytest.raises(InvalidHyperparameter):
        Dpo().resolve({"sequence_parallel": 2}, GSM8K, dense, 8)


def test_a_rank_that_no_engine_serves_or_wider_than_the_model_is_refused():
    narrow = dataclasses.replace(SMALL, hidden=576)
    for model, rank in ((dataclasses.replace(narrow, adapter_max_rank=32), 33), (narrow, 999)):
        with pytest.raises(InvalidHyperparameter) as caught:
            resolve({"lora_rank": rank}, GSM8K, model, 8)
        assert caught.value.param == "lora_rank"
    assert resolve({"lora_rank": 576}, GSM8K, narrow, 8)["lora_publish"] == "merged"


@pytest.mark.parametrize(
    "given, param",
    [
        ({"n_epochs": 0}, "n_epochs"),
        ({"n_epochs": 2.5}, "n_epochs"),
        ({"batch_size": 10**400}, "batch_size"),
        ({"learning_rate_multiplier": float("nan")}, "learning_rate_multiplier"),
        ({"lora_ranks": 8}, "lora_ranks"),
        ({"offload": "parameters", "zero_stage": 2}, "zero_stage"),
        ({"max_length": 4096}, "max_length"),
        ({"batch_size": 30, "micro_batch": 4}, "micro_batch"),
    ],
)
def test_refuses_with_the_name_of_the_parameter(given, param):
    with pytest.raises(InvalidHyperparameter) as caught:
        resolve(given, GSM8K, SMALL, 8)
    assert caught.value.param == param and caught.value.expected


def test_allowed_sizes_share_whole_micro_batches():
    assert allowed_sizes(12, 8) == [1, 2, 3, 4, 6]
    assert allowed_sizes(12, 8, 4) == [1, 3]
    assert allowed_sizes(12, 8, 1, 2) == [2, 4, 6, 8] and allowed_sizes(2, 8, 1, 2) == [2, 4]
    assert allowed_sizes(8, 3, 1, 4) == []


def test_tensor_parallel_counts_groups_of_devices_and_drops_no_inputs():
    cuttable = dataclasses.replace(LARGE, tensor_slices=8)
    made = resolve({"tensor_parallel": 2}, GSM8K, cuttable, 8)
    assert (made["tensor_parallel"], made["full"], made["zero_stage"]) == (2, False, 1)
    assert resolve({}, GSM8K, cuttable, 8)["tensor_parallel"] == 1, "never chosen on its own"
    for given, model, param in (
        ({"tensor_parallel": 3}, cuttable, "tensor_parallel"),
        ({"tensor_parallel": 16}, cuttable, "tensor_parallel"),
        ({"tensor_parallel": 2}, dataclasses.replace(cuttable, tensor_slices=1), "tensor_parallel"),
        ({"tensor_parallel": 2, "lora_dropout": 0.1}, cuttable, "lora_dropout"),
    ):
        with pytest.raises(InvalidHyperparameter) as caught:
            resolve(given, GSM8K, model, 8)
        assert caught.value.param == param


@pytest.mark.parametrize("field, value", [("zero_stage", "2"), ("colour", 1)])
def test_spec_refuses_other_fields_and_types(field, value):
    good = dataclasses.asdict(TrainSpec(**PLACE, device_kind="cpu"))
    with pytest.raises(InvalidSpec, match=field):
        TrainSpec.from_dict(good | {field: value})


TINY_DATA = DatasetStats(64, 3_245, 58)
REAL = ModelStats(134_500_000, 8192, device_kind="cpu")


def test_a_small_job_takes_idle_devices_without_another_step_or_another_token_in_one():
    alone, wide = resolve({}, TINY_DATA, REAL, 1), resolve({}, TINY_DATA, REAL, 8)
    assert allowed_sizes(alone["batch_size"], 8) == [1] and allowed_sizes(wide["batch_size"], 8) == [1, 2]
    assert alone["batch_size"] * alone["max_length"] == wide["batch_size"] * wide["max_length"]
    assert steps(TINY_DATA, alone) == steps(TINY_DATA, wide) >= LEAST_STEPS
    assert wide["max_length"] >= max(SHORTEST_ROW, TINY_DATA.longest_example_tokens)


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_plan_has_the_steps_of_the_run(sequences):
    lengths = [280, 280, 150, 300, 90, 270, 260, 290, 40, 310] * 6
    data = DatasetStats(60, sequences * sum(lengths), 310, tuple(sequences * length for length in lengths))
    rows = Dpo().rows(data) if sequences == 2 else data
    in_order = {"data_order": "given", "max_length": 512}
    for given in ({"max_length": 512, "n_epochs": 3, "batch_size": 4}, {}, in_order, {"packing": False}):
        fields = resolve(given, rows, REAL, 8)
        as_given = fields["data_order"] == "given"
        packs = plan_packs(np.array(lengths), fields["max_length"], packing=fields["packing"], as_given=as_given)
        run = StepPlan(len(packs), fields["batch_size"], 1, fields["n_epochs"], 0)
        assert steps(rows, fields) == run.total_steps
    half = dataclasses.replace(rows, lengths=rows.lengths[:30])
    assert steps(half, fields) == steps(rows, fields), "some examples stand for all"


def test_rows_are_no_shorter_than_the_longest_example_and_as_asked_for():
    long = DatasetStats(64, 20_000, 700)
    assert resolve({}, long, REAL, 8)["max_length"] >= 700
    assert resolve({"max_length": 512}, TINY_DATA, REAL, 8)["max_length"] == 512
    asked = resolve({"batch_size": 1}, TINY_DATA, REAL, 8)
    assert (asked["batch_size"], asked["max_length"]) == (1, 256)
    assert resolve({"packing": False}, TINY_DATA, REAL, 8)["max_length"] == 512


@pytest.mark.parametrize("model", [REAL, LARGE])
@pytest.mark.parametrize("examples", [64, 1000, 50_000])
def test_every_size_of_data_gets_steps_enough(model, examples):
    data = DatasetStats(examples, 200 * examples, 400)
    fields = resolve({}, data, model, 8)
    assert steps(data, fields) >= LEAST_STEPS, fields


def test_learning_rate_far_above_the_recipe_is_refused():
    usual = resolve({}, TINY_DATA, REAL, 1)["learning_rate"]
    for given, name in (
        ({"learning_rate": 1}, "learning_rate"),
        ({"learning_rate_multiplier": 10_000}, "learning_rate_multiplier"),
        ({"learning_rate": 10 * usual, "learning_rate_multiplier": 11}, "learning_rate"),
    ):
        with pytest.raises(InvalidHyperparameter) as caught:
            resolve(given, TINY_DATA, REAL, 1)
        assert caught.value.param == name
    assert resolve({"learning_rate_multiplier": 99}, TINY_DATA, REAL, 1)["learning_rate"] == pytest.approx(99 * usual)
