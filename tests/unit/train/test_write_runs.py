"""What is published from a device is cast there: the link brings no more bytes than the version has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from train.state import writing
from weights.format.layout import Layout, TensorSpec
from weights.format.slices import Strided
from weights.format.torch_views import as_tensor


class Copies(TorchDispatchMode):
    """Keeps the dtypes and elements of every copy from one tensor to another."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call is torch.ops.aten.copy_.default:
            self.made.append((args[0].dtype, args[1].dtype, args[0].numel()))
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("runs", [Strided(3, 29, 29, 1), Strided(2, 3, 8, 7), Strided(1, 8, 9, 6)])
def test_weights_are_cast_before_they_leave_a_device(monkeypatch, runs, on_device):
    monkeypatch.setattr(writing, "in_host_memory", lambda device: not on_device)
    monkeypatch.setattr(writing, "_CAST_ELEMENTS", 6)
    memory, layout = bytearray(128), Layout.plan([TensorSpec("w", "BF16", (64,))])
    draft = SimpleNamespace(layout=layout, view=lambda name: memoryview(memory))
    source = torch.randn(runs.size, generator=torch.Generator().manual_seed(0))
    with Copies() as copies:
        writing.write_runs(draft, "w", runs, source)
    wanted = torch.zeros(64, dtype=torch.bfloat16)
    wanted.as_strided((runs.count, runs.run), (runs.stride, 1), runs.start).copy_(source.view(runs.count, runs.run))
    assert torch.equal(as_tensor(memoryview(memory), "BF16", (64,)), wanted)
    if on_device:
        assert {(to, what) for to, what, _ in copies.made} == {(torch.bfloat16, torch.bfloat16)}
        assert max(elements for *_, elements in copies.made) <= 8, "a row at least"
