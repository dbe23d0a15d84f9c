"""Copies on disk: whole or absent, checked on the way out and on the way back."""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.weights.conftest import AUX, SPECS, check, write
from weights.format.config import WeightsConfig
from weights.format.errors import (
    ChecksumMismatch,
    InvalidName,
    ManifestInvalid,
    NotSealed,
    TierExists,
    TierFull,
    VersionLeased,
)
from weights.format.layout import Layout
from weights.memory.lease import pin
from weights.memory.locks import DirectoryLock
from weights.memory.store import WeightStore
from weights.tiers import copies
from weights.tiers.directory import DirectoryTier
from weights.tiers.pace import Pace
from weights.tiers.record import Name


def flip(path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("sealed", [True, False])
def test_a_copy_is_the_same_bytes_and_comes_back(store, tmp_path, sealed):
    stored = write(store, checksums=sealed)
    progress = []
    pace = Pace(None, stored.nbytes, lambda done, total: progress.append((done, total)))
    copy = copies.persist(stored, tmp_path / "models" / "1", pace=pace)
    assert sorted(os.listdir(copy.path)) == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    for name in ("model.safetensors", *AUX):
        assert (copy.path / name).read_bytes() == (stored.path / name).read_bytes()
    assert copy.manifest.sealed and copies.verify(copy.path) == copy.manifest
    assert copy.manifest.meta == {"step": 3} and copy.nbytes == stored.nbytes
    assert progress[-1] == (stored.nbytes, stored.nbytes)
    assert os.listdir(copy.path.parent) == ["1"]
    store.remove(stored)
    restored = copies.restore(store, copy.path)
    assert (restored.kind, restored.model, restored.version) == ("version", "starter", "1")
    assert restored.manifest.tensors == copy.manifest.tensors and restored.manifest.meta == {"step": 3}
    check(store, restored)


def test_eviction_takes_a_version_only_after_another_tier_has_it(store, tmp_path):
    stored = write(store)
    assert stored.pinned and store.evict(1 << 40) == 0
    copies.persist(stored, tmp_path / "released")
    assert not stored.pinned and store.evict(1 << 40) > 0
    assert store.find("version", "starter", "1") is None
    restored = copies.restore(store, tmp_path / "released")
    assert not restored.pinned, "its source is another tier"


def test_a_copy_is_never_written_over_another(store, tmp_path):
    copies.persist(write(store), tmp_path / "1")
    (tmp_path / "2").mkdir()
    with pytest.raises(TierExists):
        copies.persist(write(store, "2"), tmp_path / "1")
    with pytest.raises(TierExists):
        copies.persist(store.find("version", "starter", "2"), tmp_path / "2")
    assert store.find("version", "starter", "2").pinned
    copies.verify(tmp_path / "1")


def test_persisting_again_finishes_what_a_crash_left_undone(store, tmp_path):
    stored = write(store)
    copies.persist(stored, tmp_path / "1")
    pin(stored)  # as if it had been killed before the unpinning
    again = copies.persist(stored, tmp_path / "1")
    assert again.nbytes == 0 and again.path == tmp_path / "1" and not stored.pinned
    copies.verify(again.path)


def test_damage_in_shared_memory_does_not_reach_the_disk(store, tmp_path):
    stored = write(store)
    flip(stored.path / "model.safetensors", Layout.read(stored.path).find("counter").start)
    with pytest.raises(ChecksumMismatch, match="counter"):
        copies.persist(stored, tmp_path / "copies" / "1")
    assert os.listdir(tmp_path / "copies") == []
    assert stored.pinned


def test_a_damaged_configuration_does_not_reach_the_disk_either(store, tmp_path):
    stored = write(store)
    (stored.path / "config.json").write_bytes(b'{"model_type":"other"}')
    with pytest.raises(ChecksumMismatch, match="config.json"):
        copies.persist(stored, tmp_path / "1")
    assert os.listdir(tmp_path) == ["store"] and stored.pinned


def test_damage_on_disk_does_not_reach_shared_memory(store, tmp_path):
    stored = write(store)
    copy = copies.persist(stored, tmp_path / "1")
    store.remove(stored)
    flip(copy.path / "model.safetensors", copy.manifest.tensors["model.norm.weight"].start)
    with pytest.raises(ChecksumMismatch) as caught:
        copies.restore(store, copy.path)
    assert caught.value.tensor == "model.norm.weight"
    assert store.list("version") == [] and os.listdir(store.root / "staging") == []


def test_what_is_damaged_at_its_place_on_disk_is_replaced_and_what_is_whole_is_not(store, tmp_path):
    tier, stored = DirectoryTier("disk", tmp_path / "models"), write(store)
    name = Name("version", "starter", "1")
    tier.put(stored.path)
    os.truncate(tier.path(name) / "manifest.json", 100)
    tier.put(stored.path)
    assert tier.verify(name).version == "1" and list(tier.names("version")) == [name]
    store.remove(stored)
    again = write(store)  # of the same name, made at another time
    with pytest.raises(TierExists):
        tier.put(again.path)
    assert tier.verify(name).created_s == stored.manifest.created_s


def test_a_full_disk_leaves_nothing_behind(store, tmp_path, monkeypatch):
    stored = write(store)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        copies.persist(stored, tmp_path / "copies" / "1")
    assert os.listdir(tmp_path / "copies") == [] and stored.pinned


def test_a_full_disk_is_named_by_its_tier_and_leaves_not_even_the_models_directory(store, tmp_path, monkeypatch):
    stored, tier = write(store), DirectoryTier("disk", tmp_path / "models")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(TierFull, match="free some, or keep fewer"):
            tier.put(stored.path)
    assert os.listdir(tmp_path / "models") == []
    tier.put(stored.path)


def test_a_crash_leaves_a_hidden_partial_that_the_next_copy_removes(store, tmp_path):
    stored = write(store)
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        try:
            copies.persist(stored, tmp_path / "copies" / "1")
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    left = os.listdir(tmp_path / "copies")
    assert len(left) == 1 and left[0].startswith(".1.partial-")
    alive = tmp_path / "copies" / ".1.partial-alive"
    alive.mkdir()
    lock = DirectoryLock.try_shared(alive)
    copy = copies.persist(stored, tmp_path / "copies" / "1")
    assert sorted(os.listdir(tmp_path / "copies")) == [alive.name, "1"]
    lock.close()
    copies.verify(copy.path)


def test_a_version_stays_while_it_is_copied(store, tmp_path):
    stored = write(store)
    seen = []

    def progress(done, total):
        if not seen:
            with pytest.raises(VersionLeased):
                store.remove(stored)
            seen.append(done)

    copies.persist(stored, tmp_path / "1", pace=Pace(on_progress=progress))
    assert seen


def test_the_rate_is_kept_by_sleeping(store, tmp_path, monkeypatch):
    stored = write(store)
    now_s, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    copies.persist(stored, tmp_path / "1", pace=Pace(1000))
    assert sum(slept) == pytest.approx(stored.nbytes / 1000)
    with pytest.raises(ValueError, match="rate_bytes_s"):
        Pace(0)


@pytest.mark.parametrize("name", [".hidden", ".."])
def test_hidden_destinations_are_refused(store, tmp_path, name):
    (tmp_path / "x").mkdir()
    with pytest.raises((InvalidName, TierExists)):
        copies.persist(write(store), tmp_path / "x" / name)


def test_a_foreign_checkpoint_is_sealed_and_imported(store, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    tensors = {"w": torch.randn(33, 7).to(torch.bfloat16), "b": torch.arange(5)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes(b"{}")
    with pytest.raises(ManifestInvalid, match="missing"):
        copies.verify(source)
    manifest = copies.seal_dir(source, kind="version", model="org/m", version="main", meta={"source": "hub"})
    assert copies.verify(source) == manifest and set(manifest.aux_files) == {"config.json"}
    assert copies.seal_dir(source, kind="version", model="org/m", version="main").tensors == manifest.tensors
    stored = copies.restore(store, source)
    assert (stored.model, stored.version) == ("org/m", "main")
    assert (stored.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    loaded = load_file(stored.path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_unsealed_directory_is_not_restored_unverified(store, tmp_path):
    stored = write(store, checksums=False)
    other = WeightStore(tmp_path / "other", budget_bytes=None)
    with pytest.raises(NotSealed):
        copies.restore(other, stored.path)


def test_config_gives_the_budget():
    assert WeightsConfig().budget_for(1000) == 500
    assert WeightsConfig(budget_share=0.25).budget_for(1000) == 250
    assert WeightsConfig(budget_bytes=77).budget_for(1000) == 77
    for wrong in ({"budget_share": 0}, {"budget_bytes": -1}, {"buget": 1}, {"checksum_threads": 0}):
        with pytest.raises(ValueError):
            WeightsConfig(**wrong)


def test_specs_of_these_tests_cover_alignment_cases():
    sizes = {spec.nbytes % 64 for spec in SPECS}
    assert len(sizes) > 2, "aligned and odd sizes both"
