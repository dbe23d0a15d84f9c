"""Page locking around a swap, by a kind of device of our own that keeps the order of its calls."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from runtime.devices.kinds import kind_of
from serve.load import shm_source
from serve.load.host_ring import HostRing
from serve.load.load_plan import LoadPlan, Piece, Region, Target
from serve.load.loader import VersionLoader
from serve.load.shm_source import VersionSource

PAGE = 4096
ROWS, COLUMNS = 64, 1024  # of two bytes: 32 pages


EXPECTED = {name: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta") for name in ("a", "b")}


class Driver:
    """Its calls: (name, thread, bytes) in order. Page-locked ranges may not overlap."""

    def __init__(self):
        self.calls, self.locked = [], {}

    def lock(self, address, nbytes):
        end = address + nbytes
        assert all(end <= start or start + length <= address for start, length in self.locked.items())
        self.calls.append(("lock", threading.current_thread().name, nbytes))
        self.locked[address] = nbytes
        return True

    def unlock(self, address):
        self.calls.append(("unlock", threading.current_thread().name, self.locked.pop(address)))


class Gpu(type(kind_of("cpu"))):
    on_host, locks_pages = False, True

    def __init__(self, driver):
        self.driver = driver

    def page_lock(self):
        return self.driver


def plan_of(rank, world, of=0, dtype=torch.bfloat16):
    """A worker's rows of `a`, and its columns of `b`."""
    rows, columns = ROWS // world, COLUMNS // world
    upper = Piece(
        Region(0, (rows, COLUMNS), (COLUMNS, 1)), "a", Region(rank * rows * COLUMNS, (rows, COLUMNS), (COLUMNS, 1))
    )
    left = Region(rank * columns, (ROWS, columns), (COLUMNS, 1))
    lower = Piece(Region(rows * COLUMNS, (ROWS, columns), (columns, 1)), "b", left)
    target = Target((2 * rows * COLUMNS,), dtype, [upper, lower])
    return LoadPlan({(of, "w"): target}, [], [], EXPECTED, frozenset(EXPECTED))


@pytest.fixture
def version(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_source, "LOCK_BYTES", 4 * PAGE)
    generator = torch.Generator().manual_seed(1)
    content = {name: torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16) for name in ("a", "b")}
    save_file(content, tmp_path / "model.safetensors")
    return tmp_path, content


@pytest.fixture
def worker():
    driver = Driver()

    def make(rank, world):
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.empty(2 * ROWS * COLUMNS // world, dtype=torch.bfloat16))
        config = SimpleNamespace(quantization=None)
        loader = VersionLoader(model, config, plan_of(rank, world, id(model)), torch.device("cpu"), None)
        loader._kind = Gpu(driver)
        return loader, driver

    return make


def expected(content, rank, world):
    rows, columns = ROWS // world, COLUMNS // world
    return torch.cat(
        [
            content["a"][rank * rows : (rank + 1) * rows].flatten(),
            content["b"][:, rank * columns : (rank + 1) * columns].flatten(),
        ]
    )


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_swap_neither_locks_nor_unlocks_pages_in_its_pause(version, worker, world):
    path, content = version
    for rank in range(world):
        engine, driver = worker(rank, world)
        driver.calls.clear()
        engine.stage(str(path))
        engine._mapped.result()
        assert engine.staged()
        locked = [size for name, _, size in driver.calls if name == "lock"]
        assert locked and max(locked) <= 4 * PAGE, "one call would hold up the engine's own calls"
        rows_bytes = ROWS // world * COLUMNS * 2 + (ROWS * COLUMNS * 2 if world == 1 else 0)
        assert rows_bytes <= sum(locked) <= rows_bytes + 4 * PAGE, "each worker locks what it copies itself"

        before = len(driver.calls)
        engine.load(str(path))
        assert len(driver.calls) == before, "within the pause"
        assert torch.equal(engine.model.w, expected(content, rank, world))

        engine.unmap()
        engine.close()
        assert not driver.locked and len(driver.calls) == 2 * before
        assert {thread for name, thread, _ in driver.calls if name == "unlock"} == {"versions_0"}


def test_what_vllms_loaders_read_has_no_locked_pieces(version, worker):
    """They copy whole tensors, and CUDA refuses a copy that crosses from one locked piece into the next; and they may
    write into what they read, which a shared mapping would bring into the version."""
    path, content = version
    engine, driver = worker(0, 1)
    engine._own_layout, seen = "experts are laid out for the device's kernel", []

    def reload(weights_iterator):
        tensor, source = dict(weights_iterator)["b"], engine._mapped.result()
        seen.append((source.locked_runs("b", 0, ROWS * COLUMNS * 2), torch.equal(tensor, content["b"])))
        tensor.zero_()

    engine._reload = reload
    engine.stage(str(path))
    engine._mapped.result()
    assert engine.load(str(path))["how"] == "layerwise"
    assert seen == [(None, True)] and not driver.locked
    engine.unmap()
    engine.close()
    again = VersionSource(path).map()
    assert torch.equal(again.tensor("b"), content["b"])
    again.close()


def test_a_wake_does_not_load_what_an_earlier_load_left_mapped(version, worker, tmp_path):
    path, content = version
    engine, _ = worker(0, 1)
    engine.load(str(path))
    other = tmp_path / "other"
    other.mkdir()
    save_file({name: -tensor for name, tensor in content.items()}, other / "model.safetensors")
    engine.load(str(other))
    assert torch.equal(engine.model.w, -expected(content, 0, 1))
    engine.close()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (7, 3), (2, 3, 4), (1, 50)])
@pytest.mark.parametrize("buffer_bytes", [4, 12, 48, 400])
def test_ring_copies_tensors_that_are_larger_than_its_buffers(shape, buffer_bytes):
    stored, target = torch.randn(shape), torch.zeros(shape)
    with HostRing(torch.device("cpu"), 2, buffer_bytes) as ring:
        ring.copy(target, stored)
    assert torch.equal(target, stored)
