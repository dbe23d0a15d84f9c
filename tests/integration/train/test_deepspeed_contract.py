"""What `train.state.fragments` and `train.trainer.engine` take from DeepSpeed's inside is there and means the same."""

import os

import deepspeed
import pytest
import torch
from deepspeed import comm
from torch import nn

from tests.train_support.specs import host_spec
from train.plan.errors import InvalidSpec
from train.state import fragments
from train.trainer.engine import _groups, init_world, meeting_url


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory):
    before = dict(os.environ)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    init_world("cpu", meeting_url(tmp_path_factory.mktemp("world") / "meeting"), 30.0)
    yield
    comm.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
        self.model[1].weight.requires_grad = False

    def forward(self, x):
        return self.model(x).float().square().mean()


def engine_of(stage, precision):
    torch.manual_seed(0)
    module = Tiny()
    trained = [p for p in module.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    # Two groups, as with weight decay: ZeRO-2 links the moments of the first only.
    groups = [{"params": [p for p in trained if p.ndim == 2]}, {"params": [p for p in trained if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    fragments.sum_gradients(engine)
    fragments.coarsen_clipping(engine)
    return engine


def steps(engine, n):
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for _ in range(2 * n):
        engine.backward(engine(torch.ones(1, 7, dtype=dtype)) * 1, scale_wrt_gas=False)
        engine.step()


def test_init_world_other_device_kind_is_refused():
    with pytest.raises(InvalidSpec, match="'cuda'.*'cpu'"):
        init_world("cuda", "file:///nowhere")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fragments_cover_every_parameter_and_moment(stage, precision):
    engine = engine_of(stage, precision)
    assert [(p.name, p.shape, p.trained) for p in fragments.parameters(engine)] == [
        ("0.weight", (5, 7), True),
        ("0.bias", (5,), True),
        ("1.weight", (3, 5), False),
    ]
    assert not any(fragment.moments for fragment in fragments.trained_fragments(engine))
    steps(engine, 1)
    before = {f.name: f for f in fragments.trained_fragments(engine)}
    assert {n: (f.start, f.numel) for n, f in before.items()} == {"0.weight": (0, 35), "0.bias": (0, 5)}
    for fragment in before.values():
        assert fragment.weights.dtype == torch.float32 and set(fragment.moments) == set(fragments.MOMENTS)
        assert fragment.moments["exp_avg"].abs().sum() > 0
    (frozen,) = fragments.frozen_fragments(engine)
    assert frozen.name == "1.weight" and frozen.numel == 15 and not frozen.moments
    state = engine.optimizer.optimizer.state[fragments._flat_masters(engine)[0]]
    assert state["step"].item() == 1.0


def test_groups_align_experts_to_16_bytes():
    """ZeRO keeps parameters end to end; torch's grouped product asks this of a GPU's memory alone."""
    scale, experts = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4, 16, 8))
    ((ordered, _),) = (group.values() for group in _groups([scale, experts], host_spec()))
    assert [p.numel() for p in ordered] == [4 * 16 * 8, 1]
