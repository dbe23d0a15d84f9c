"""What benchmarks/device_copies.py does on a GPU, on a processor that locks pages: its calls and how it cuts copies."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import device_copies
from runtime.devices import kinds
from runtime.devices.cpu import Cpu
from serve.load import shm_source

HOST = torch.device("cpu")


class Pages:
    """Page locks, and which addresses they hold."""

    def __init__(self):
        self.held: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> bool:
        self.held[address] = nbytes
        return True

    def unlock(self, address: int) -> None:
        del self.held[address]


class Locking(Cpu):
    def __init__(self):
        self.pages = Pages()

    def page_lock(self):
        return self.pages


class Crossings(TorchDispatchMode):
    """As a driver, refuses a copy from or to memory of which one lock holds a part only."""

    def __init__(self, pages: Pages):
        super().__init__()
        self.pages, self.within = pages, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            for tensor in args[:2]:
                begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for start, nbytes in self.pages.held.items():
                    if begin < start + nbytes and start < end:
                        assert start <= begin and end <= start + nbytes, "it crosses from one lock into the next"
                        self.within += 1
        return func(*args, **(kwargs or {}))


def test_every_way_is_measured_and_no_copy_crosses_a_lock(monkeypatch, tmp_path):
    monkeypatch.setattr(device_copies, "COLUMNS", 64)
    monkeypatch.setattr(device_copies, "LINK_BYTES", 2**16)
    monkeypatch.setattr(shm_source, "LOCK_BYTES", 2**16)
    kind = Locking()
    monkeypatch.setattr(kinds, "of_torch", lambda device: kind)
    version = device_copies._write_version(tmp_path, 2**20)
    with Crossings(kind.pages) as crossings:
        found = device_copies.measured(version, HOST, lambda: 0)
    assert crossings.within > 8 and not kind.pages.held
    assert found["limit_in"] is None, "a processor has no link"
    rates = {*device_copies.RATES, *device_copies.RATES.values()} - {"limit_in"}
    assert all(found[name] > 0 for name in rates) and found["bytes"] > 0 and found["map_and_lock_s"] > 0
