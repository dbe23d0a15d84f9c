"""Loading a version into a running engine: the recorded plan (fused, sliced, padded, tied, expert) and page locks."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from runtime.devices.kinds import kind_of
from serve.core.errors import VersionMismatch
from serve.load import shm_source
from serve.load.host_ring import HostRing
from serve.load.load_plan import LoadPlan, LoadRecorder, Piece, Region, Target
from serve.load.loader import VersionLoader
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
def test_plan_replay_equals_direct_load(tmp_path, world):
    first, second = write(tmp_path / "a", tensors(1)), write(tmp_path / "b", tensors(2))
    for rank in range(world):
        model, reference = Fused(rank, world), Fused(rank, world)
        plan = record(model, first)
        assert plan.complete and plan.unwritten == []
        record(reference, second)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        with HostRing(torch.device("cpu"), threads=3, buffer_bytes=6) as ring:  # three elements per buffer
            replay(plan, model, second, ring)
        for name, parameter in reference.named_parameters():
            assert torch.equal(getattr(model, name), parameter), name


def test_mapped_view_exists_only_for_adjacent_pieces(tmp_path):
    model, source = Fused(), write(tmp_path / "a", tensors(1))
    plan = record(model, source)
    of = {name: plan.targets[id(model), name].mapped_view(source) for name in ("qk", "embedding", "down", "experts")}
    # Not adjacent: safetensors stores k before q, the embedding is padded, an expert is transposed.
    assert [name for name, tensor in of.items() if tensor is not None] == ["down"]
    assert torch.equal(of["down"], tensors(1)["down"])
    renamed = {"q": "k", "k": "q"}
    other = write(tmp_path / "b", {renamed.get(name, name): tensor for name, tensor in tensors(1).items()})
    swapped = Target(plan.targets[id(model), "qk"].shape, torch.bfloat16)
    swapped.pieces = [replace(piece, name=renamed[piece.name]) for piece in plan.targets[id(model), "qk"].pieces]
    assert torch.equal(swapped.mapped_view(other), model.qk.data)


def test_plan_replays_dtype_casts(tmp_path):
    content = {name: tensor.float() for name, tensor in tensors(3).items()}
    source, model = write(tmp_path / "a", content), Fused()
    plan = record(model, source)
    loaded = model.qk.detach().clone()
    model.qk.data.zero_()
    replay(plan, model, source)
    assert plan.complete and torch.equal(model.qk, loaded)
    assert plan.bytes_read(source) == source.nbytes


def test_plan_lists_unfilled_parameter_as_unwritten(tmp_path):
    content = tensors(1)
    del content["k"]
    plan = record(Fused(), write(tmp_path / "a", content))
    assert plan.unwritten == plan.unplanned == ["qk"]


def test_plan_lists_computed_parameter_as_unplanned(tmp_path):
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
def test_plan_check_refuses_other_models_version(tmp_path, change, text):
    plan = record(Fused(), write(tmp_path / "a", tensors(1)))
    content = tensors(2)
    change(content)
    with pytest.raises(VersionMismatch, match=text):
        plan.check(write(tmp_path / "b", content))


def test_view_writes_stay_private(tmp_path):
    source = write(tmp_path / "a", tensors(1))
    other = VersionSource(tmp_path / "a").map()
    source.tensor("q").fill_(7)
    assert torch.equal(other.tensor("q"), tensors(1)["q"])
    assert torch.equal(VersionSource(tmp_path / "a").map().tensor("q"), tensors(1)["q"])


PAGE = 4096
ROWS, COLUMNS = 64, 1024  # elements of two bytes: 32 pages


EXPECTED = {name: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta") for name in ("a", "b")}


class Driver:
    """A stand-in for PageLock. `calls`: (name, thread, bytes) in order. Page-locked ranges may not overlap."""

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
    """A plan that reads one worker's rows of `a` and columns of `b`."""
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
def test_swap_locks_pages_only_outside_pause(version, worker, world):
    path, content = version
    for rank in range(world):
        engine, driver = worker(rank, world)
        driver.calls.clear()
        engine.stage(str(path))
        engine._mapped.result()
        assert engine.staged()
        locked = [size for name, _, size in driver.calls if name == "lock"]
        assert locked and max(locked) <= 4 * PAGE, "a larger call would delay the engine's own calls"
        rows_bytes = ROWS // world * COLUMNS * 2 + (ROWS * COLUMNS * 2 if world == 1 else 0)
        assert rows_bytes <= sum(locked) <= rows_bytes + 4 * PAGE, "each worker locks only pages that it copies"

        before = len(driver.calls)
        engine.load(str(path))
        assert len(driver.calls) == before, "no lock or unlock during the pause"
        assert torch.equal(engine.model.w, expected(content, rank, world))

        engine.unmap()
        engine.close()
        assert not driver.locked and len(driver.calls) == 2 * before
        assert {thread for name, thread, _ in driver.calls if name == "unlock"} == {"versions_0"}


def test_layerwise_reload_reads_private_unlocked_pages(version, worker):
    """vLLM's loaders copy whole tensors, and CUDA refuses copies that cross from one locked piece into the next; they
    may also write to their source, which a shared mapping would write to the version."""
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


def test_load_replaces_mapping_of_earlier_version(version, worker, tmp_path):
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
def test_ring_copies_tensors_larger_than_buffers(shape, buffer_bytes):
    stored, target = torch.randn(shape), torch.zeros(shape)
    with HostRing(torch.device("cpu"), 2, buffer_bytes) as ring:
        ring.copy(target, stored)
    assert torch.equal(target, stored)
