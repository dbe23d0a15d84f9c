"""A model built for a snapshot to fill is the loaded one in everything but the values of its parameters."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed import comm
from transformers import AutoModelForCausalLM

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.control.progress import ControlSignals, Progress
from train.model.model import load_model
from train.state.stored_names import stored_names
from train.trainer import prepare


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True)])
def test_only_the_values_of_parameters_are_left_out(tmp_path, family, tied):
    base = make_model_dir(tmp_path / "base", family=family, tied=tied)
    spec = host_spec(base)
    loaded, empty = load_model(spec), load_model(spec, weights=False)
    assert {(n, p.shape, p.dtype) for n, p in loaded.named_parameters()} == {
        (n, p.shape, p.dtype) for n, p in empty.named_parameters()
    }
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    assert all(p.requires_grad for p in empty.parameters()) and empty.training and not empty.config.use_cache
    assert empty.generation_config.to_dict() == loaded.generation_config.to_dict()

    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            parameter.copy_(dict(loaded.named_parameters())[name])
    ids = torch.arange(12)[None]
    for model in (loaded, empty):
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, empty(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_it_is_written_back_under_the_names_of_the_checkpoint(tmp_path, family):
    base = make_model_dir(tmp_path / "base", family=family)
    loaded, empty = (load_model(host_spec(base), weights=weights) for weights in (True, False))
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.named_parameters()}
    expected, found = (stored_names(model, shapes, base) for model in (loaded, empty))
    for name in shapes:
        assert found.of(name) == expected.of(name)


@pytest.mark.parametrize(
    "family, tied, reads", [("mixtral", False, False), ("llama", False, False), ("qwen2", True, True)]
)
def test_a_rank_whose_weights_are_sent_reads_none(tmp_path, monkeypatch, family, tied, reads):
    """Loading ties only what the checkpoint does not have twice, so where something may be tied all ranks load."""
    base = make_model_dir(tmp_path / "base", family=family, tied=tied)
    spec, was_read = host_spec(base, full=False, lora_targets=("q_proj",), zero_stage=3), []
    loaded, load = load_model(spec), AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: was_read.append(a) or load(*a, **k))
    waits = load_model(spec, sent=True)
    assert bool(was_read) == reads
    for of_one, of_other in zip(loaded.named_parameters(), waits.named_parameters(), strict=True):
        (name, ours), (its, other) = of_one, of_other
        assert (name, ours.shape, ours.dtype, ours.requires_grad) == (
            its,
            other.shape,
            other.dtype,
            other.requires_grad,
        )


def test_only_the_first_rank_reads_the_weights_under_zero_3(tmp_path, monkeypatch):
    asked = []

    def load(spec, **how):
        asked.append((spec.zero_stage, comm.get_rank(), how["sent"]))
        raise InterruptedError

    monkeypatch.setattr(prepare, "load_model", load)
    monkeypatch.setattr(prepare, "open_token_set", lambda *args, **more: SimpleNamespace())
    monkeypatch.setattr(prepare, "_tell_about_data", lambda *args: None)
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    for zero_stage in (1, 3):
        for rank in (0, 1):
            monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
            with pytest.raises(InterruptedError):
                spec = host_spec(tmp_path, zero_stage=zero_stage, train_path="t", shm_root=str(tmp_path))
                prepare.prepare(spec, lambda *a, **k: None, ControlSignals(), Progress())
    assert asked == [(1, 0, False), (1, 1, False), (3, 0, False), (3, 1, True)]
