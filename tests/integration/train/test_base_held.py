"""What a rank trains from stays as it is while the rank lives."""

import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from train.model.model import load_model
from train.trainer.worker import hold_base
from weights.format.errors import VersionNotFound
from weights.format.layout import Layout, TensorSpec
from weights.memory.segment import mappings
from weights.memory.store import WeightStore
from weights.tiers.copies import seal_dir, take_in


def test_hold_base_keeps_mapped_weights_until_release(tmp_path):
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    base = make_model_dir(tmp_path / "base")
    seal_dir(base, kind="version", model="base", version="v1")
    stored = take_in(store, base)
    spec = host_spec(stored.path, base_model="base", base_version="v1", full=False, lora_rank=2)
    held = hold_base(spec)
    frozen = {name: one for name, one in load_model(spec).named_parameters() if not one.requires_grad}
    before = {name: parameter.clone() for name, parameter in frozen.items()}
    store.evict(1 << 40)
    assert store.find("version", "base", "v1") is not None
    held.clear()
    store.remove(stored)  # its file goes to the pool, and the next version is written into it
    layout = Layout.plan([TensorSpec("w", "U8", (stored.nbytes - 4096,))])
    with store.reserve(layout, kind="version", model="other", version="v1") as draft:
        draft.view("w")[:] = b"\xff" * layout.find("w").nbytes
        draft.commit(meta={})
    assert any(not torch.equal(frozen[name], before[name]) for name in before), "they are mapped, not copied"
    with pytest.raises(VersionNotFound, match="base/v1, the starting point of j"):
        hold_base(spec)
    mappings.clear()
