"""Copies on disk: complete or absent, checked when written and when restored."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.weights.conftest import AUX, check, flip, write
from weights.format.errors import IntegrityError
from weights.format.names import Name
from weights.tiers.copies import DirectoryCopies, seal_dir, take_in, verify

V1 = Name("version", "starter", "1")


@pytest.fixture
def tier(tmp_path):
    return DirectoryCopies(tmp_path / "models")


def visible(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("sealed", [True, False])
def test_put_and_restore_keep_bytes(store, tier, sealed):
    stored = write(store, sealed=sealed)
    done = []
    tier.put(stored.path, done.append)
    path = tier.path(V1)
    assert sorted(os.listdir(path)) == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    for name in ("model.safetensors", *AUX):
        assert (path / name).read_bytes() == (stored.path / name).read_bytes()
    manifest = verify(path)
    assert manifest.meta == {"step": 3} and sum(done) == stored.nbytes
    store.remove(stored)
    restored = tier.restore(store, V1)
    assert (restored.kind, restored.model, restored.version) == ("version", "starter", "1")
    assert restored.manifest.files == manifest.files and not restored.pinned
    check(store, restored)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_put_refuses_damaged_version(store, tier, tmp_path, file):
    stored = write(store)
    flip(stored.path / file)
    with pytest.raises(IntegrityError):
        tier.put(stored.path)
    assert visible(tmp_path / "models") == []


def test_collect_removes_killed_copy(store, tier, tmp_path):
    stored = write(store)
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        try:
            tier.put(stored.path)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert tier.manifests() == {} and visible(tmp_path / "models") != []
    tier.collect()
    assert visible(tmp_path / "models") == []
    tier.put(stored.path)
    verify(tier.path(V1))


def test_seal_dir_makes_foreign_checkpoint_importable(store, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    tensors = {"w": torch.randn(33, 7).to(torch.bfloat16), "b": torch.arange(5)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="missing"):
        verify(source)
    manifest = seal_dir(source, kind="version", model="org/m", version="main", meta={"source": "hub"})
    assert verify(source) == manifest and set(manifest.files) == {"config.json", "model.safetensors"}
    assert seal_dir(source, kind="version", model="org/m", version="main").files == manifest.files
    stored = take_in(store, source)
    assert (stored.model, stored.version) == ("org/m", "main")
    assert (stored.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    loaded = load_file(stored.path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
