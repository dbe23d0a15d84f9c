"""A rank's memory goes into a snapshot and comes back, wherever its elements are."""

import threading

import pytest
import torch

from runtime.devices.kind import DeviceKind
from train.state import copies
from train.state.copies import StagingRing
from weights.format.layout import Layout, TensorSpec
from weights.format.torch_views import Strided, as_tensor, narrow, part
from weights.memory.store import WeightStore


class LateBuffer(torch.Tensor):
    """Page-locked memory: copies in and out of it that do not block are only queued."""

    queue: list = []

    def copy_(self, source, non_blocking=False):
        if not non_blocking:
            return super().copy_(source)
        LateBuffer.queue.append((self.as_subclass(torch.Tensor), source))
        return self


class Late(DeviceKind):
    """Its copies run in order, and no sooner than somebody waits for a mark behind them."""

    def __init__(self):
        self.lock, self.waits = threading.Lock(), 0
        LateBuffer.queue = []

    def locked_buffer(self, elements):
        return torch.full((elements,), -1.0).as_subclass(LateBuffer)

    def mark(self):
        queued = len(LateBuffer.queue)

        def wait():
            with self.lock:
                self.waits += 1
                for place in range(queued):
                    job = LateBuffer.queue[place]
                    if job is not None:
                        job[0].copy_(job[1])
                        LateBuffer.queue[place] = None

        return wait


def test_write_then_read_restores_ranges_and_columns(tmp_path):
    layout = Layout.plan(
        [
            TensorSpec("a", "F32", (16, 4)),
            TensorSpec("b", "F32", (16, 4)),
            TensorSpec("odd", "F32", (3,)),
            TensorSpec("half", "BF16", (5,)),
        ]
    )
    flat, other, columns, odd = torch.randn(64), torch.randn(40), torch.randn(32), torch.randn(3)
    (last_two_columns,) = part(narrow((16, 4), 1, 2, 2), 0, 32)
    pieces = [
        ("a", Strided(0, 16, 16, 1), flat[:16]),
        ("a", Strided(20, 4, 4, 1), flat[16:20]),
        ("a", Strided(24, 40, 40, 1), other),
        ("b", last_two_columns, columns),
        ("odd", Strided(0, 3, 3, 1), odd),
        ("half", Strided(1, 4, 4, 1), torch.tensor([1.0, -2.0, 0.5, 0.0])),  # cast both ways
    ]
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    with store.reserve(layout, kind="snapshot", model="j", version="1") as draft:
        for placed in layout:
            draft.view(placed.spec.name)[:] = bytes(placed.nbytes)
        copies.write(draft, pieces)
        stored = draft.commit(meta={})
    ours = [memory.clone() for _, _, memory in pieces]
    with store.lease(stored) as lease:
        b = as_tensor(lease.view("b"), "F32", (16, 4))
        assert torch.equal(b[:, 2:], ours[3].view(16, 2)) and torch.count_nonzero(b[:, :2]) == 0
        for _, _, memory in pieces:
            memory.zero_()
        copies.read(lease, pieces)
    assert all(torch.equal(memory, was) for (_, _, memory), was in zip(pieces, ours, strict=True))


@pytest.mark.parametrize("dtype, code", [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_write_from_device_fills_every_file(tmp_path, monkeypatch, dtype, code):
    monkeypatch.setattr(copies, "in_host_memory", lambda device: False)
    monkeypatch.setattr(copies, "of_torch", lambda device: Late())
    monkeypatch.setattr(copies, "_PART_BYTES", 256)
    layout = Layout.plan([TensorSpec(name, code, (500,)) for name in "abc"], max_file_bytes=1000)
    pieces = [(name, Strided(0, 500, 500, 1), torch.randn(500).to(dtype).float()) for name in "abc"]
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    with store.reserve(layout, kind="snapshot", model="j", version="1") as draft:
        copies.write(draft, pieces)
        stored = draft.commit(meta={})
    back = [(name, runs, torch.zeros_like(ours)) for name, runs, ours in pieces]
    with store.lease(stored) as lease:
        copies.read(lease, back)
    assert len(layout.files) == 3
    assert all(torch.equal(ours, was) for (_, _, ours), (_, _, was) in zip(back, pieces, strict=True))


def test_staging_ring_failed_copy_raises_and_ends_threads():
    def fails(buffer):
        raise OSError("no space")

    before = threading.active_count()
    with pytest.raises(OSError, match="no space"), StagingRing(Late(), 8) as ring:
        ring.to_host(torch.ones(8), fails)
    assert threading.active_count() == before
