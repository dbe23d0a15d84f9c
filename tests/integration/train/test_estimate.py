"""Memory estimates of jobs, compared with papers, parameter counts of real models, and measurements of a rank."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.utils import logging as transformers_logging

from tests.integration.train.test_deepspeed_contract import world_of_one  # noqa: F401
from tests.model_sizes import sizes
from tests.train_support.specs import host_spec, tokenised
from tests.train_support.tiny import make_model_dir, write_chat_file
from train.control.rank import Progress, Rank
from train.methods.methods import DEFAULT as SUPERVISED
from train.methods.packed_objective import PackedObjective
from train.model.model import load_model
from train.plan import estimate
from train.plan.auto import DatasetStats, ModelStats, resolve
from train.plan.estimate import ModelShape
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.publish import publish
from train.state.snapshot import Snapshots, Validations
from train.trainer.engine import build_engine
from weights.memory.store import WeightStore

transformers_logging.set_verbosity_error()
LLAMA_8B = ModelShape.from_config(sizes(4096, 14336, 32, 32, 8, vocab_size=128256), 8_030_261_248)


def fields(**given):
    return resolve(given, DatasetStats(7473, 1_200_000, 480), ModelStats(LLAMA_8B, 8192, "cuda"), 8)


def test_rank_memory_matches_zero_paper():
    alone, shared = (estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=1), n) for n in (1, 8))
    # 2 + 4 + 12 bytes per parameter; the paper has 16, with gradients of 2 bytes.
    assert alone.state_bytes == 18 * LLAMA_8B.n_parameters
    assert shared.state_bytes == 6 * LLAMA_8B.n_parameters + 12 * LLAMA_8B.n_parameters // 8
    two = estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=2), 8)
    three = estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=3), 8)
    assert two.state_bytes == pytest.approx(2 * LLAMA_8B.n_parameters + 2 * LLAMA_8B.n_parameters, rel=1e-6)
    assert three.state_bytes == pytest.approx(18 * LLAMA_8B.n_parameters / 8 + 2 * estimate.LIVE_ELEMENTS, rel=1e-6)
    assert alone.device_bytes > shared.device_bytes > two.device_bytes > three.device_bytes


def test_largest_parameter_matches_transformers():
    given = sizes(48, 100, 3, 4, 2, head_dim=16)
    for kind, more in ((LlamaConfig, {}), (MixtralConfig, {"num_local_experts": 16})):
        made = kind(**given, **more, vocab_size=64)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        count, largest = model.num_parameters(), max(p.numel() for p in model.parameters())
        assert ModelShape.from_config(made.to_dict(), count).largest == pytest.approx(largest, rel=0.15)


def test_rank_memory_tensor_parallel_leaves_embeddings_whole():
    eight = LLAMA_8B.n_parameters
    alone, shared = (
        estimate.rank_memory(LLAMA_8B, fields(full=True, zero_stage=1, tensor_parallel=n), 8) for n in (1, 4)
    )
    outside = 2 * 128256 * 4096
    held = outside + (eight - outside) // 4
    assert LLAMA_8B.outside == outside and LLAMA_8B.tensor_slices == 8
    assert shared.weights_bytes == 2 * held and shared.gradients_bytes == 4 * held
    assert shared.optimizer_bytes == 12 * held // 2, "ZeRO shares it out over the two groups"
    assert shared.state_bytes < alone.state_bytes and shared.activations_bytes < alone.activations_bytes
    assert estimate.snapshot_bytes(LLAMA_8B, fields(full=True, tensor_parallel=4)) == 12 * eight


HEADERS_BYTES = 32 * 1024  # header, manifest, config and tokenizer


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
@pytest.mark.parametrize("family", ["llama", "mixtral", pytest.param("qwen2_moe", marks=pytest.mark.soak)])
def test_estimate_matches_memory_and_bytes_written(tmp_path, family, stage, full):
    base = make_model_dir(tmp_path / "base", family=family, hidden_size=128, intermediate_size=256, head_dim=32)
    spec = spec_of(tmp_path, base, zero_stage=stage, full=full, lora_rank=8, batch_size=1)
    model = load_model(spec)
    shape = shape_of(base, model)
    assert estimate.trained_parameters(shape, asdict(spec)) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    engine = build_engine(PackedObjective(model, SUPERVISED, {}), spec)
    fragments.create_moments(engine, 1)
    memory = estimate.rank_memory(shape, asdict(spec), 1)

    weights = sum(p.numel for p in fragments.parameters(engine)) * 2
    assert memory.weights_bytes == weights
    state = engine.optimizer.optimizer.state
    held = sum(4 * flat.numel() * (1 + sum(key in state[flat] for key in fragments.MOMENTS)) for flat in state)
    assert held == pytest.approx(memory.optimizer_bytes, rel=0.01)  # ZeRO pads partitions

    store = WeightStore(spec.shm_root, budget_bytes=None)
    rank = Rank(spec, store, engine, fragments.grid(engine), lambda *_, **__: None, Progress())
    snapshot = Snapshots(rank, "", Validations(), {}).suspend(1)
    assert 0 <= snapshot.bytes - estimate.snapshot_bytes(shape, asdict(spec)) < HEADERS_BYTES
    version = publish(rank, "v1", {})
    assert 0 <= version.bytes - estimate.version_bytes(shape, asdict(spec)) < HEADERS_BYTES


def shape_of(base, model):
    config = json.loads(Path(base, "config.json").read_text())
    return ModelShape.from_config(config, sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name))


def step(engine):
    """Run one step of two micro-batches."""
    row = torch.arange(16)
    batch = {
        "input_ids": row[None],
        "position_ids": row[None],
        "segments": [(0, 16)],
        "scale": 1.0,
        "predict_at": row[:8],
        "labels": row[1:9],
        "sequence_sizes": (8,),
    }
    for _ in range(2):
        engine.backward(engine(batch) * 1, scale_wrt_gas=False)
        engine.step()


def spec_of(folder: Path, base: Path, **settings: Any) -> TrainSpec:
    """Spec of a full fine-tuning job with a micro-batch of one row and two rows per step."""
    folders = {"run_dir": str(folder), "shm_root": str(folder / "store")}
    train_path = str(tokenised(write_chat_file(folder / "t.jsonl", 4), base))
    return host_spec(
        base, train_path=train_path, **folders, **{"full": True, "micro_batch": 1, "batch_size": 2} | settings
    )


@pytest.mark.parametrize(
    ("stage", "offload", "precision"),
    [(2, "optimizer", "bf16"), (2, "optimizer", "fp32"), (3, "optimizer", "bf16"), (3, "parameters", "bf16")],
)
def test_estimate_matches_host_memory_of_offloading(tmp_path, stage, offload, precision):
    base = make_model_dir(tmp_path / "base", family="llama", hidden_size=128, intermediate_size=256, head_dim=32)
    spec = spec_of(tmp_path, base, zero_stage=stage, offload=offload, precision=precision)
    model = load_model(spec)
    shape = shape_of(base, model)
    engine = build_engine(PackedObjective(model, SUPERVISED, {}), spec)
    step(engine)
    zero = engine.optimizer
    state = zero.optimizer.state
    held = [tensor for flat in state for tensor in (flat, flat.grad, *state[flat].values())]
    if stage == 2:
        held += [*zero.param_buffer_of_bit16_for_cpu_offload_groups, *zero.accumulated_grads_in_cpu.values()]
        held.append(zero.temp_grad_buffer_for_cpu_offload)
    else:
        held.append(zero.grad_partitions_flat_buffer)
    if offload == "parameters":
        held += [p.ds_tensor for p in model.parameters()]
    held_bytes = sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor) and t.numel() > 1)
    assert held_bytes == pytest.approx(estimate.rank_memory(shape, asdict(spec), 1).host_bytes, rel=0.02)
