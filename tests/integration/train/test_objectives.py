"""Packed rows and the fused loss are exact: the same loss and gradients as the plain way."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.train_support.specs import host_spec
from tests.train_support.tiny import gradients, make_model_dir
from train.data.packing import StepPlan, build_row
from train.methods import packed_objective
from train.methods.methods import DEFAULT as SUPERVISED
from train.methods.packed_objective import PackedObjective, to_batch
from train.model.model import linear_layers, load_model
from train.plan.errors import UnsupportedModel
from train.plan.spec import TrainSpec


@pytest.fixture(scope="module", params=["llama", "qwen2-tied", "sliding"])
def spec(request, tmp_path_factory):
    family, _, tied = request.param.partition("-")
    config = {"family": family, "tied": bool(tied)}
    if family == "sliding":
        config = {"family": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    base = make_model_dir(tmp_path_factory.mktemp("base"), dtype=torch.float32, **config)
    return host_spec(base, precision="fp32")


def examples(n, seed=0):
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        size = int(draw.integers(5, 60))
        made.append((draw.integers(3, 384, size).astype(np.int32), draw.random(size) < 0.4))
    return [(ids, mask if mask[1:].any() else np.ones_like(mask)) for ids, mask in made]


def plain_loss(model, ids, mask):
    """The textbook way: whole logits of one example, shifted labels."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    labels = torch.where(torch.from_numpy(mask), tokens[0], -100)
    model.set_attn_implementation("eager")
    logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    model.set_attn_implementation("packed")
    return functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")


@pytest.mark.parametrize("rows, held", [(1000, 1000), (7, 1000), (7, 20), (7, 7)])
def test_packed_loss_and_gradients_equal_single_examples(spec, monkeypatch, rows, held):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 384 * rows)
    monkeypatch.setattr(packed_objective, "held_rows", lambda n, *_: min(n, held))
    model = load_model(spec)
    data = examples(6)
    expected = sum(plain_loss(model, *example) for example in data)
    expected.backward()
    wanted = gradients(model)

    objective = PackedObjective(model, SUPERVISED, {})
    row = build_row([data[:4], data[4:]], 256, 0, packing=True)
    got = objective(to_batch(row, 1.0, "cpu"))
    got.backward()
    assert torch.allclose(got, expected, rtol=1e-5)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-5), name


def test_step_loss_and_gradients_ignore_micro_batch(spec):
    packs = [examples(3, seed) for seed in range(8)]
    steps = {}
    for micro_batch in (1, 4):
        model = load_model(spec)
        plan, total = StepPlan(len(packs), 8, micro_batch, 1, spec.seed), 0.0
        for _, numbers in plan.micro_batches(0, 0, 1):
            row = build_row([packs[number] for number in numbers], 256, 0, packing=True)
            part = PackedObjective(model, SUPERVISED, {})(to_batch(row, 1 / 100, "cpu"))
            part.backward()
            total += float(part.detach())
        steps[micro_batch] = total, gradients(model)
    (alone, of_alone), (four, of_four) = steps.values()
    assert four == pytest.approx(alone, rel=1e-6)
    for name, gradient in of_four.items():
        assert torch.allclose(gradient, of_alone[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("rows", [1000, 7])
def test_accuracy_counts_likeliest_tokens(spec, monkeypatch, rows):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 384 * rows)
    objective = PackedObjective(load_model(spec), SUPERVISED, {})
    row = build_row([examples(6)], 512, 0, packing=True)
    batch = to_batch(row, 1.0, "cpu")
    with torch.no_grad():
        # A third of what is to be learnt is what the model says.
        row = {name: batch[name] for name in ("input_ids", "position_ids", "segments")}
        logits = objective.model(**row, logits_to_keep=batch["predict_at"], use_cache=False).logits
        said = logits[0].argmax(-1)
        batch["labels"] = torch.where(torch.arange(len(said)) % 3 == 0, said, (said + 1) % 384)
    objective(batch).backward()  # with gradients, which are made of the logits in their place
    with torch.no_grad():
        objective(batch)
    right = -(-len(said) // 3)
    assert objective.take_metrics() == [2 * right, 2 * len(said)] and objective.take_metrics() == [0, 0]
    with torch.no_grad():
        objective._fused = False  # by the model's own forward
        objective(batch)
        objective(batch | {"as_reference": True})
    assert objective.take_metrics() == [right, len(said)]


def test_padding_row_changes_no_gradient_or_metric(spec):
    model = load_model(spec)
    objective = PackedObjective(model, SUPERVISED, {})
    loss = objective(to_batch(build_row([examples(2)], 128, 0, packing=True), 0.0, "cpu"))
    loss.backward()
    # Every weight has a gradient: ZeRO's ranks wait for each.
    assert loss == 0 and all(not gradient.any() for gradient in gradients(model).values())
    assert objective.take_metrics() == [0, 0]


def test_packed_examples_do_not_influence_each_other(spec):
    objective = PackedObjective(load_model(spec), SUPERVISED, {})
    a, b, c = examples(3, seed=1)
    with torch.no_grad():
        alone = objective(to_batch(build_row([[a]], 128, 0, packing=True), 1.0, "cpu"))
        after_b = objective(to_batch(build_row([[(b[0], b[1] & False), a]], 128, 0, packing=True), 1.0, "cpu"))
        after_c = objective(to_batch(build_row([[(c[0], c[1] & False), a]], 128, 0, packing=True), 1.0, "cpu"))
    assert after_b == after_c and torch.allclose(alone, after_b, rtol=1e-6)


def test_lora_trains_factors_and_starts_as_base(spec, tmp_path):
    base = load_model(spec)
    lora = load_model(TrainSpec(**{**spec.__dict__, "full": False, "lora_rank": 4}))
    trained = {name for name, p in lora.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert set(linear_layers(base)) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    row = build_row([examples(2)], 128, 0, packing=True)
    with torch.no_grad():
        losses = [PackedObjective(m, SUPERVISED, {})(to_batch(row, 1.0, "cpu")) for m in (base, lora)]
    assert losses[0] == losses[1]
    with pytest.raises(UnsupportedModel, match="lora_targets"):
        load_model(TrainSpec(**{**spec.__dict__, "full": False, "lora_targets": ("nowhere",)}))
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(TrainSpec(**{**spec.__dict__, "base_path": str(tmp_path)}))


@pytest.mark.parametrize(
    "family, config, reason",
    [
        ("gpt_oss", {}, "gpt_oss .* attention sinks"),
        ("llama", {"attn_logit_softcapping": 50.0}, "caps its attention logits"),
        ("llama", {"index_topk": 8}, "an indexer picks"),
    ],
)
def test_load_model_unsupported_attention_is_refused(tmp_path, family, config, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(host_spec(make_model_dir(tmp_path / "base", family=family, **config)))


def test_experts_of_uneven_width_have_gradients(tmp_path):
    model = load_model(host_spec(make_model_dir(tmp_path / "base", family="qwen3_moe")))  # 52 columns of 2 bytes
    loss = PackedObjective(model, SUPERVISED, {})(to_batch(build_row([examples(2)], 128, 0, packing=True), 1.0, "cpu"))
    loss.backward()
    assert loss > 0 and all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


def test_lora_targets_of_experts_are_left_out(tmp_path):
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    Glm4MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    spec = host_spec(tmp_path, full=False, lora_rank=2)
    trained = [name for name, p in load_model(spec).named_parameters() if p.requires_grad]
    assert trained and not any("experts" in name for name in trained)
    with pytest.raises(UnsupportedModel, match="experts of glm4_moe"):
        load_model(replace(spec, lora_targets=("q_proj", "gate_proj", "up_proj", "down_proj")))
