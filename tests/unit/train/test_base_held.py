"""What a rank trains from stays as it is while the rank lives."""

from __future__ import annotations

import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.model.model import load_model
from train.plan.spec import TrainSpec
from train.trainer.worker import hold_base
from weights.format.errors import VersionNotFound
from weights.format.layout import Layout, TensorSpec
from weights.memory.segment import mappings
from weights.memory.store import WeightStore
from weights.tiers.copies import seal_dir, take_in


def spec_of(path, tmp_path) -> TrainSpec:
    folders = {"run_dir": str(tmp_path), "shm_root": str(tmp_path)}
    return host_spec(path, **folders, base_model="base", base_version="v1", full=False, lora_rank=2)


def test_frozen_weights_are_the_stores_own_bytes_and_stay_until_the_rank_lets_go(tmp_path):
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    base = make_model_dir(tmp_path / "base")
    seal_dir(base, kind="version", model="base", version="v1")
    stored = take_in(store, base)
    spec = spec_of(stored.path, tmp_path)
    held = hold_base(spec)
    model = load_model(spec)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    before = {name: parameter.clone() for name, parameter in frozen.items()}

    def another_version(name: str) -> None:
        store.evict(1 << 40 if name == "full" else 0)
        layout = Layout.plan([TensorSpec("w", "U8", (stored.nbytes - 4096,))])
        with store.reserve(layout, kind="version", model="other", version=name) as draft:
            draft.view("w")[:] = b"\xff" * layout.find("w").nbytes
            draft.commit(meta={})

    another_version("full")
    assert store.find("version", "base", "v1") is not None
    assert all(torch.equal(frozen[name], before[name]) for name in before)
    held.clear()
    store.remove(store.find("version", "base", "v1"))  # as an eviction without room for all; its file goes to the pool
    another_version("in its place")
    assert any(not torch.equal(frozen[name], before[name]) for name in before), "they are mapped, not copied"
    with pytest.raises(VersionNotFound, match="base/v1, which j is trained from"):
        hold_base(spec)
    mappings.clear()
