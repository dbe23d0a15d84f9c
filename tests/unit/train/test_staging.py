"""The ring between a device and pageable memory, with a device whose copies arrive only when they are waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from runtime.devices.kinds import Cpu
from train.state import staging
from train.state.staging import StagingRing


class LateBuffer(torch.Tensor):
    """Page-locked memory: copies in and out of it that do not block are only queued."""

    queue: list = []

    def copy_(self, source, non_blocking=False):
        if not non_blocking:
            return super().copy_(source)
        LateBuffer.queue.append((self.as_subclass(torch.Tensor), source))
        return self


class Late(Cpu):
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


@pytest.mark.parametrize("count", [1, staging.BUFFERS, 5 * staging.BUFFERS + 3])
def test_every_piece_arrives_whole_though_buffers_are_used_again(count):
    kind, source = Late(), torch.randn(count, 64)
    target, back = torch.zeros_like(source), torch.zeros(count, 64).as_subclass(LateBuffer)
    with StagingRing(kind, 64) as ring:
        for n in range(count):
            ring.to_host(source[n], target[n].copy_)
    assert torch.equal(target, source) and kind.waits >= count
    kind = Late()
    with StagingRing(kind, 64) as ring:
        for n in range(count):
            fill = lambda buffer, n=n: buffer.as_subclass(torch.Tensor).copy_(target[n])  # noqa: E731
            ring.to_device(back[n], fill, torch.float32)
    assert torch.equal(back.as_subclass(torch.Tensor), source)


def test_a_failed_copy_is_raised_and_no_thread_is_left():
    def fails(buffer):
        raise OSError("no space")

    before = threading.active_count()
    with pytest.raises(OSError, match="no space"), StagingRing(Late(), 8) as ring:
        ring.to_host(torch.ones(8), fails)
    assert threading.active_count() == before
