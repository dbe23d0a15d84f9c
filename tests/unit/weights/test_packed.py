"""A packed tier: what is written once, what comes back, what is noticed."""

from __future__ import annotations

import errno
import os
import shutil
import signal

import numpy as np
import pytest

from tests.unit.weights.conftest import check, content, write
from weights.format.errors import (
    ChecksumMismatch,
    ObjectDamaged,
    TierFull,
    TierUnavailable,
    VersionNotFound,
)
from weights.format.layout import Layout, TensorSpec
from weights.format.manifest import KINDS
from weights.memory.store import WeightStore
from weights.tiers import codec
from weights.tiers.objects import DirectoryObjects
from weights.tiers.packed import PackedTier
from weights.tiers.record import Name


@pytest.fixture
def home(tmp_path):
    return tmp_path / "packed"


@pytest.fixture
def tier(home):
    return PackedTier("disk", DirectoryObjects(home, create=True))


def name_of(stored):
    return Name(stored.kind, stored.model, stored.version)


def files(home):
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())


def objects(home):
    return [name for name in files(home) if name.startswith("objects/")]


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_finds_every_kind(store, tier, kind):
    stored = write(store, kind=kind)
    tier.put(stored.path)
    again = PackedTier("disk", DirectoryObjects(tier.where))
    assert set(again.names(kind)) == {name_of(stored)} == {Name.of_key(name_of(stored).key)}
    again.collect()
    assert again.verify(name_of(stored)).kind == kind


@pytest.mark.parametrize("sealed", [True, False])
def test_a_version_comes_back_as_it_was(store, tier, sealed):
    stored = write(store, checksums=sealed)
    suffixes = (".safetensors", ".json")
    before = {path.name: path.read_bytes() for path in stored.path.iterdir() if path.suffix in suffixes}
    done = tier.put(stored.path)
    assert done > 0
    store.remove(stored)
    again = PackedTier("disk", DirectoryObjects(tier.where)).restore(store, name_of(stored))
    check(store, again)
    assert again.manifest.meta == {"step": 3} and again.sealed and not again.pinned
    before.pop("manifest.json")
    assert before == {name: (again.path / name).read_bytes() for name in before}
    assert tier.verify(name_of(stored)).tensors.keys() == again.manifest.tensors.keys()


def test_several_files_with_an_index_come_back(store, tier):
    specs = [TensorSpec(f"t{i}", "F32", (100,)) for i in range(5)]
    with store.reserve(Layout.plan(specs, max_file_bytes=800), kind="version", model="m", version="1") as draft:
        for spec in specs:
            draft.view(spec.name)[:] = content(spec.name, "1", spec.nbytes)
        stored = draft.commit(meta={})
    index = (stored.path / "model.safetensors.index.json").read_bytes()
    tier.put(stored.path)
    store.remove(stored)
    again = tier.restore(store, name_of(stored))
    assert (again.path / "model.safetensors.index.json").read_bytes() == index
    check(store, again)


def test_a_put_that_was_done_before_writes_nothing_but_its_record(store, tier, home):
    stored = write(store)
    tier.put(stored.path)
    before = {name: (home / name).stat().st_mtime_ns for name in objects(home)}
    (home / name_of(stored).key).unlink()
    again = PackedTier("disk", DirectoryObjects(home)).put(stored.path)
    assert again == 0
    assert {name: (home / name).stat().st_mtime_ns for name in objects(home)} == before


def test_big_tensors_are_cut_into_objects(store, tier, home, monkeypatch):
    monkeypatch.setattr("weights.tiers.packed.OBJECT_BYTES", 5000)
    stored = write(store)
    tier.put(stored.path)
    assert len(objects(home)) > 10
    store.remove(stored)
    check(store, tier.restore(store, name_of(stored)))
    tier.verify(name_of(stored))


@pytest.mark.parametrize("harm", ["flip", "truncate", "missing", "record"])
def test_damage_is_noticed_and_never_mapped(store, tier, home, harm):
    stored = write(store)
    tier.put(stored.path)
    store.remove(stored)
    biggest = max(objects(home), key=lambda name: (home / name).stat().st_size)
    victim = home / (name_of(stored).key if harm == "record" else biggest)
    if harm == "missing":
        victim.unlink()
    elif harm == "truncate":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        flip(victim)
    with pytest.raises(ObjectDamaged):
        tier.restore(store, name_of(stored))
    with pytest.raises(ObjectDamaged):
        tier.verify(name_of(stored))
    assert store.list("version") == [] and os.listdir(store.root / "staging") == []
    fresh = PackedTier("disk", DirectoryObjects(home))
    fresh.quarantine(name_of(stored))
    fresh.collect()
    assert files(home) == []


def test_damage_in_the_source_is_not_packed(store, tier, home):
    stored = write(store)
    flip(stored.path / "model.safetensors")
    with pytest.raises(ChecksumMismatch):
        tier.put(stored.path)
    assert tier.names("version") == {}
    tier.collect()
    assert files(home) == []


def test_kill_at_every_point_of_a_put_loses_nothing_and_leaves_no_litter(store, tmp_path, home):
    """A process is killed before its n-th call that changes the disk, for every n."""
    stored, kept = write(store, "2"), write(store)
    for n in range(200):
        shutil.rmtree(home, ignore_errors=True)
        PackedTier("disk", DirectoryObjects(home, create=True)).put(kept.path)
        pid = os.fork()
        if pid == 0:
            left = n

            def counted(real):
                def call(*arguments, **named):
                    nonlocal left
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                    return real(*arguments, **named)

                return call

            for what in ("fsync", "rename", "mkdir", "unlink"):
                setattr(os, what, counted(getattr(os, what)))
            try:
                tier = PackedTier("disk", DirectoryObjects(home))
                tier.put(stored.path)
                tier.remove(name_of(kept))
                tier.collect()
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        after = PackedTier("disk", DirectoryObjects(home))
        names = set(after.names("version"))
        assert names & {name_of(kept), name_of(stored)}
        for name in names:
            after.verify(name)
        after.put(stored.path)
        after.verify(name_of(stored))
        after.remove(name_of(kept))
        after.collect()
        needed = {name for name in files(home) if name.startswith("objects/")}
        assert len(files(home)) == len(needed) + 1 and after.names("version").keys() == {name_of(stored)}
        if not killed:
            assert n > 5
            return
    raise AssertionError("it never came to its end")


def test_a_full_disk_is_said_and_leaves_no_record(store, home):
    stored = write(store)
    tier = PackedTier("disk", DirectoryObjects(home, create=True, free_bytes=1 << 60))
    with pytest.raises(TierFull, match="must keep"):
        tier.put(stored.path)
    assert files(home) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_really_full(store, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=40k tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("mounting is not allowed here")
    try:
        stored = write(store)
        tier = PackedTier("disk", DirectoryObjects(small))
        with pytest.raises(TierFull):
            tier.put(stored.path)
        assert tier.names("version") == {} and not list((small / ".partial").iterdir())
        os.system(f"mount -o remount,size=4m {small}")
        tier.put(stored.path)
        tier.verify(name_of(stored))
    finally:
        os.system(f"umount {small}")


def test_collecting_takes_only_what_no_record_names(store, tier, home):
    kept = [write(store, version) for version in ("1", "2", "3")]
    for stored in kept:
        tier.put(stored.path)
    before = len(objects(home))
    tier.remove(name_of(kept[1]))
    assert len(objects(home)) < before
    litter = home / Name("version", "starter", "gone").folder / "00000-x"
    litter.parent.mkdir(parents=True)
    litter.write_bytes(b"x")
    tier.collect()
    assert not litter.exists()
    for stored in (kept[0], kept[2]):
        tier.verify(name_of(stored))


def test_an_object_cut_short_is_sent_again(store, tier, tmp_path):
    stored = write(store)
    tier.put(stored.path)
    target = DirectoryObjects(tmp_path / "remote", create=True)
    for key in objects(tmp_path / "packed"):
        target.put(key, b"cut")
    other = PackedTier("remote", target)
    other.copy_from(tier, name_of(stored))
    other.verify(name_of(stored))


def test_an_object_that_cannot_be_written_leaves_what_was_there(home, monkeypatch):
    kept = DirectoryObjects(home, create=True)
    kept.put("owner", b"box-1")

    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(TierUnavailable, match="Input/output"):
        kept.put("owner", b"box-2")
    assert kept.get("owner") == b"box-1" and files(home) == ["owner"]


def test_a_lost_mount_is_unavailable_and_not_filled_in_beneath(store, tmp_path):
    tier = PackedTier("remote", DirectoryObjects(tmp_path / "mnt"))
    with pytest.raises(TierUnavailable, match="mounted"):
        tier.put(write(store).path)
    assert not (tmp_path / "mnt").exists()


def test_one_tier_is_copied_from_another(store, tier, tmp_path):
    stored = write(store)
    tier.put(stored.path)
    other = PackedTier("remote", DirectoryObjects(tmp_path / "remote", create=True))
    assert other.copy_from(tier, name_of(stored)) > 0
    assert other.copy_from(tier, name_of(stored)) == 0
    store.remove(stored)
    check(store, other.restore(store, name_of(stored)))
    with pytest.raises(VersionNotFound):
        other.restore(store, Name("version", "nobody", "1"))


def test_moments_are_quantised_only_where_asked_and_within_their_error(store, home):
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32) * 1e-3
    squares = values**2
    specs = [TensorSpec(f"{part}.w", "F32", (3000,)) for part in ("master", "exp_avg", "exp_avg_sq")]
    arrays = {"master.w": values, "exp_avg.w": values, "exp_avg_sq.w": squares}
    with store.reserve(Layout.plan(specs), kind="snapshot", model="job", version="step-1") as draft:
        for name, array in arrays.items():
            draft.view(name)[:] = memoryview(array).cast("B")
        stored = draft.commit(meta={"step": 1})
    tier = PackedTier("disk", DirectoryObjects(home, create=True), int8_moments=True)
    done = tier.put(stored.path)
    assert done < stored.nbytes * 0.5
    tier.verify(name_of(stored))
    store.remove(stored)
    again = tier.restore(store, name_of(stored))
    assert again.manifest.meta["quantised"] == ["exp_avg.w", "exp_avg_sq.w"]
    with store.lease(again) as lease:
        found = {name: np.frombuffer(bytes(lease.view(name)), np.float32) for name in arrays}
    assert np.array_equal(found["master.w"], values)
    assert np.abs(found["exp_avg.w"] - values).max() <= np.abs(values).max() / 254 * 1.001
    root, exact = np.sqrt(found["exp_avg_sq.w"]), np.sqrt(squares)
    assert (root >= exact * (1 - 1e-6)).all() and (root - exact).max() <= exact.max() / 255 * 1.001


def test_a_record_does_not_pass_for_another(store, tier, home):
    stored = write(store)
    tier.put(stored.path)
    stolen = Name("version", "other", "1")
    (home / stolen.key).parent.mkdir(parents=True)
    shutil.copy(home / name_of(stored).key, home / stolen.key)
    fresh = PackedTier("disk", DirectoryObjects(home))
    assert set(fresh.names("version")) == {name_of(stored)}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"AWO1",
        codec.encode(b"abc" * 99, codec="zstd", width=2)[:-3],
        codec.encode(b"abc", codec="zstd") + b"x",
        b"\0" * 64,
    ],
)
def test_no_bytes_make_the_decoder_fail_otherwise(raw):
    with pytest.raises(ObjectDamaged):
        codec.decode(raw, name="x")


def test_a_store_of_another_process_reads_it(store, tier, tmp_path):
    stored = write(store)
    tier.put(stored.path)
    other = WeightStore(tmp_path / "other", budget_bytes=None)
    check(other, tier.restore(other, name_of(stored)))
