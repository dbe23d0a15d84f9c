"""The recorded plan, on plain torch modules with loaders like vLLM's: fused, sliced, padded, tied, expert."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from serve.core.errors import VersionMismatch
from serve.load.host_ring import HostRing
from serve.load.load_plan import LoadRecorder
from serve.load.shm_source import VersionSource


class Fused(torch.nn.Module):
    """q and k in one parameter, a padded embedding, two experts in one parameter; rank `rank` of `world`."""

    def __init__(self, rank=0, world=1):
        super().__init__()
        self.rank, self.world = rank, world
        self.qk = torch.nn.Parameter(torch.empty(8 // world, 4, dtype=torch.bfloat16))
        self.embedding = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.empty(4, 6 // world, dtype=torch.bfloat16))
        self.experts = torch.nn.Parameter(torch.empty(2, 2, 4, dtype=torch.bfloat16))
        self.register_buffer("computed", torch.arange(3.0))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("q", "k"):
                rows = 4 // self.world
                shard = tensor.narrow(0, self.rank * rows, rows)
                self.qk.data.narrow(0, 0 if name == "q" else rows, rows).copy_(shard)
            elif name == "embedding":
                self.embedding.data[:5].copy_(tensor)
                self.embedding.data[5:].fill_(0)
            elif name == "down":
                columns = 6 // self.world
                self.down.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif name.startswith("expert"):
                self.experts.data[int(name[-1])].copy_(tensor.t() if tensor.shape == (4, 2) else tensor)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "q": make(4, 4),
        "k": make(4, 4),
        "embedding": make(5, 4),
        "down": make(4, 6),
        "expert0": make(4, 2),
        "expert1": make(2, 4),
    }


def write(directory, content):
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, directory / "model.safetensors")
    return VersionSource(directory).map()


def record(model, source):
    with torch.no_grad(), LoadRecorder(model, source) as recorder:
        model.load_weights(source.tensors())
    return recorder.plan()


def replay(plan, model, source, ring=None):
    for (module_id, name), target in plan.targets.items():
        assert module_id == id(model)
        target.fill(getattr(model, name).data.view(-1), source, ring)


@pytest.mark.parametrize("world", [1, 2])
def test_replaying_a_plan_equals_loading(tmp_path, world):
    first, second = write(tmp_path / "a", tensors(1)), write(tmp_path / "b", tensors(2))
    for rank in range(world):
        model, reference = Fused(rank, world), Fused(rank, world)
        plan = record(model, first)
        assert plan.complete and plan.unwritten == []
        record(reference, second)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        with HostRing(torch.device("cpu"), threads=3, buffer_bytes=6) as ring:  # buffers of three elements
            replay(plan, model, second, ring)
        for name, parameter in reference.named_parameters():
            assert torch.equal(getattr(model, name), parameter), name


def test_a_cast_on_load_is_part_of_the_plan(tmp_path):
    content = {name: tensor.float() for name, tensor in tensors(3).items()}
    source, model = write(tmp_path / "a", content), Fused()
    plan = record(model, source)
    loaded = model.qk.detach().clone()
    model.qk.data.zero_()
    replay(plan, model, source)
    assert plan.complete and torch.equal(model.qk, loaded)
    assert plan.bytes_read(source) == source.nbytes


def test_a_parameter_that_nothing_fills_is_unwritten(tmp_path):
    content = tensors(1)
    del content["k"]
    plan = record(Fused(), write(tmp_path / "a", content))
    assert plan.unwritten == plan.unplanned == ["qk"]


def test_a_parameter_computed_on_load_is_unplanned_but_written(tmp_path):
    class Computed(Fused):
        def load_weights(self, weights):
            super().load_weights(weights)
            with torch.no_grad():
                self.down.add_(1)

    plan = record(Computed(), write(tmp_path / "a", tensors(1)))
    assert plan.unplanned == ["down"] and plan.unwritten == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("q"), "q is missing"),
        (lambda t: t.update(q=torch.zeros(4, 5)), "q is"),
        (lambda t: t.update(q=torch.zeros(4, 4, dtype=torch.int32)), "torch.int32"),
        (lambda t: t.update(stranger=torch.zeros(1)), "stranger is not part of this model"),
    ],
)
def test_another_models_version_does_not_pass(tmp_path, change, text):
    plan = record(Fused(), write(tmp_path / "a", tensors(1)))
    content = tensors(2)
    change(content)
    with pytest.raises(VersionMismatch, match=text):
        plan.check(write(tmp_path / "b", content))


def test_writing_to_a_view_reaches_neither_the_file_nor_another_reader(tmp_path):
    source = write(tmp_path / "a", tensors(1))
    other = VersionSource(tmp_path / "a").map()
    source.tensor("q").fill_(7)
    assert torch.equal(other.tensor("q"), tensors(1)["q"])
    assert torch.equal(VersionSource(tmp_path / "a").map().tensor("q"), tensors(1)["q"])
