"""A copy beside training is of one step, whatever training does meanwhile; and it waits for nobody's pace."""

import threading

import deepspeed
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.unit.train.test_deepspeed_contract import engine_of, steps, world_of_one  # noqa: F401
from train.state import fragments, snapshot
from weights.format.torch_views import as_tensor
from weights.memory.store import WeightStore


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_snapshot_begun_before_a_step_holds_the_state_before_it(tmp_path, stage):
    engine = engine_of(stage, "bf16")
    steps(engine, 2)
    spec = host_spec()
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    before = {
        (part, f.name): tensor.clone()
        for f in fragments.trained_fragments(engine)
        for part, tensor in (("master", f.weights), *f.moments.items())
    }
    writing = snapshot.begin_snapshot(engine, spec, store, snapshot.snapshot_layout(engine), 2, pace_s=3600.0)
    assert store.list("snapshot") == [], "invisible until it is whole"
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 7, dtype=torch.bfloat16)) * 1, scale_wrt_gas=False)
        if engine.is_gradient_accumulation_boundary():
            written = writing.finish()  # at an hour's pace it would never end by itself
        engine.step()
    (stored,) = store.list("snapshot")
    assert written.path == str(stored.path) and 0 < written.stall_s <= written.seconds
    after = {f.name: f.weights for f in fragments.trained_fragments(engine)}
    with store.lease(stored) as lease:
        for (part, name), expected in before.items():
            held = as_tensor(lease.view(f"{part}.{name}"), "F32", (expected.numel(),))
            assert torch.equal(held, expected)
            assert part != "master" or not torch.equal(held, after[name]), "the step went on"
            del held


def test_what_goes_wrong_on_the_thread_is_raised_by_finish():
    from train.state.writing import Writing

    def fill():
        yield 1
        raise RuntimeError("the segment is gone")

    before = set(threading.enumerate())
    writing = Writing(None, fill, elements=2, meta={}, began=0.0, pace_s=0.0)
    with pytest.raises(RuntimeError, match="the segment is gone"):
        writing.finish()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x):
        return self.model(x).square().mean()


@pytest.mark.parametrize("groups", [1, 2])
def test_what_zero_keeps_end_to_end_is_one_run_of_each_part(groups):
    module = Layers()
    matrices, vectors = ([p for p in module.parameters() if p.ndim == n] for n in (2, 1))
    given = list(module.parameters()) if groups == 1 else [{"params": matrices}, {"params": vectors}]
    optimizer = torch.optim.AdamW(given, lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    fragments.create_moments(engine, 1)
    plan = snapshot.plan_of_written(engine, snapshot.snapshot_layout(engine))
    assert len(plan.moves) == 3 * groups and plan.elements == 3 * 3 * (256 + 16)
