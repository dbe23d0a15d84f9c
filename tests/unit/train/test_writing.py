"""What ZeRO keeps end to end is written as few runs."""

import deepspeed
import pytest
import torch

from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.state import fragments, snapshot


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
    assert len(plan.moves) == 3 * groups
    assert sum(move.runs.size for move in plan.moves) == 3 * 3 * (256 + 16)
