"""A remote tier in a directory and in S3 (a real S3 server on loopback): round trips and damage."""

import itertools
import logging
import os
import shutil
from functools import partial

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from tests.unit.weights.conftest import check, deadly, flip, write
from weights.format.config import Location
from weights.format.errors import IntegrityError, TierUnavailable, VersionNotFound
from weights.format.layout import Layout, TensorSpec
from weights.format.manifest import read_whole
from weights.format.names import KINDS, Name
from weights.memory.store import WeightStore
from weights.tiers import moments
from weights.tiers.copies import RemoteCopies
from weights.tiers.objects import DirectoryObjects, S3Objects, objects_at

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.fixture(scope="module")
def server():
    running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(server, tmp_path):
    """Settings of a location in an S3 bucket."""
    path = tmp_path / "credentials"
    path.write_text(f"[box]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = {SECRET}\n")
    return {
        "url": "s3://weights/box-1",
        "endpoint": server,
        "credentials_file": str(path),
        "credentials_profile": "box",
    }


@pytest.fixture
def home(tmp_path):
    (tmp_path / "mount").mkdir()
    return tmp_path / "mount"


@pytest.fixture(params=["directory", "s3"])
def objects(request, home):
    if request.param == "directory":
        yield DirectoryObjects(home)
        return
    made = objects_at(Location(**request.getfixturevalue("bucket")))
    made._client.create_bucket(Bucket="weights")
    yield made
    for key in list(made.list("")):
        made.delete(key)


@pytest.fixture
def tier(home):
    return RemoteCopies(DirectoryObjects(home))


def name_of(stored):
    return Name(stored.kind, stored.model, stored.version)


def files(home):
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())


def read_all(tier, name):
    """Compare every byte in the tier with its checksum, as a restore does."""
    where, manifest, chunks = tier._open(name)
    read_whole(manifest, chunks, source=where)


def test_objects_put_keeps_newest_bytes_until_delete(objects):
    assert list(objects.list("objects/")) == []
    objects.put("objects/ab/x", b"one")
    objects.put("objects/ab/x", b"other")
    objects.put("records/versions/ft:a%2Fb/v1", b"")
    assert objects.get("objects/ab/x") == b"other"
    assert list(objects.list("objects/")) == ["objects/ab/x"]
    assert list(objects.list("records/")) == ["records/versions/ft:a%2Fb/v1"]
    objects.delete("objects/ab/x")
    objects.delete("objects/ab/x")
    with pytest.raises(IntegrityError, match="missing"):
        objects.get("objects/ab/x")
    objects.sweep()
    assert list(objects.list("records/")) == ["records/versions/ft:a%2Fb/v1"]


@pytest.mark.parametrize("kind", KINDS)
def test_version_round_trips_through_directory_and_s3(objects, store, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("weights.format.manifest.CHUNK_BYTES", 5000)
    monkeypatch.setattr("weights.tiers.copies.CHUNK_BYTES", 5000)
    stored = write(store, kind=kind, sealed=kind != "snapshot")
    tier, done = RemoteCopies(objects), []
    tier.put(stored.path, done.append)
    assert sum(done) == stored.nbytes
    again, other = RemoteCopies(objects), WeightStore(tmp_path / "other", budget_bytes=None)
    assert {name: one.nbytes for name, one in again.manifests().items()} == {name_of(stored): stored.nbytes}
    restored = again.restore(other, name_of(stored))
    check(other, restored)
    assert restored.manifest.meta["step"] == 3 and not restored.pinned
    for file in ("config.json", "model.safetensors"):
        assert (restored.path / file).read_bytes() == (stored.path / file).read_bytes()
    again.remove(name_of(stored))
    assert list(objects.list("")) == [] and again.manifests() == {}
    with pytest.raises(VersionNotFound):
        again.restore(store, name_of(stored))


@pytest.mark.parametrize("harm", ["flip", "truncate", "missing"])
def test_damaged_object_is_detected_and_never_visible(store, tier, home, harm):
    stored = write(store)
    tier.put(stored.path)
    store.remove(stored)
    (victim,) = (home / name for name in files(home) if "model.safetensors" in name)
    if harm == "missing":
        victim.unlink()
    elif harm == "truncate":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        flip(victim)
    with pytest.raises(IntegrityError):
        tier.restore(store, name_of(stored))
    assert store.list("version") == [] and os.listdir(store.root / "staging") == []


def test_damaged_record_hides_version_until_next_put(store, tier, home):
    stored = write(store)
    tier.put(stored.path)
    flip(home / "copies" / name_of(stored).key)
    fresh = RemoteCopies(DirectoryObjects(home))
    assert fresh.manifests() == {}
    fresh.put(stored.path)
    read_all(fresh, name_of(stored))


def test_put_killed_at_any_call_loses_and_leaves_nothing(store, home):
    """Kill a process before its n-th call that changes the disk, for every n."""
    stored, kept = write(store, "2"), write(store)
    for n in range(200):
        shutil.rmtree(home)
        home.mkdir()
        RemoteCopies(DirectoryObjects(home)).put(kept.path)
        pid = os.fork()
        if pid == 0:
            calls = itertools.count()
            for what in ("fsync", "rename", "mkdir", "unlink"):
                setattr(os, what, partial(deadly, n, calls, getattr(os, what)))
            try:
                tier = RemoteCopies(DirectoryObjects(home))
                tier.put(stored.path)
                tier.remove(name_of(kept))
                tier.collect()
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        after = RemoteCopies(DirectoryObjects(home))
        assert after.manifests().keys() & {name_of(kept), name_of(stored)}
        for name in after.manifests():
            read_all(after, name)
        after.put(stored.path)
        read_all(after, name_of(stored))
        after.remove(name_of(kept))
        after.collect()
        assert len(files(home)) == 4 and after.manifests().keys() == {name_of(stored)}
        if not killed:
            assert n > 5
            return
    raise AssertionError("it never came to its end")


def test_claim_rejects_other_box_and_emptied_location(tier, home):
    tier.claim("box-1", first=True)
    tier.claim("box-1", first=False)
    with pytest.raises(TierUnavailable, match="box-1"):
        tier.claim("box-2", first=True)
    (home / "owner").unlink()
    with pytest.raises(TierUnavailable, match="mounted"):
        tier.claim("box-1", first=False)


def test_int8_moments_round_trip_within_error(store, home, tier, monkeypatch):
    monkeypatch.setattr("weights.format.manifest.CHUNK_BYTES", 5000)
    monkeypatch.setattr("weights.tiers.copies.CHUNK_BYTES", 5000)
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32) * 1e-3
    arrays = {"master.w": values, "exp_avg.w": values, "exp_avg_sq.w": values**2}
    layout = Layout.plan([TensorSpec(name, "F32", (3000,)) for name in arrays])
    with store.reserve(layout, kind="snapshot", model="job", version="step-1") as draft:
        for name, array in arrays.items():
            draft.view(name)[:] = memoryview(array).cast("B")
        stored = draft.commit(meta={"step": 1})
    lossy = RemoteCopies(DirectoryObjects(home), int8_moments=True)
    lossy.put(stored.path)
    assert sum((home / name).stat().st_size for name in files(home) if name.startswith("parts/")) < 0.53 * 36000
    store.remove(stored)
    restored = RemoteCopies(DirectoryObjects(home)).restore(store, name_of(stored))
    with store.lease(restored) as lease:
        master, first, second = (np.frombuffer(bytes(lease.view(name)), np.float32) for name in arrays)
    assert np.array_equal(master, values)
    assert np.abs(first - values).max() <= np.abs(values).max() / 254 * 1.001
    root, exact = np.sqrt(second), np.abs(values)
    assert (root >= exact * (1 - 1e-6)).all() and (root - exact).max() <= exact.max() / 255 * 1.001
    tier.put(restored.path)  # exact, although read in blocks
    read_all(tier, name_of(stored))
    with pytest.raises(IntegrityError):
        moments.decode(b"short", [(0, 396, moments.FIRST)], 0, 396)


def test_s3_errors_do_not_show_credentials(server, bucket, caplog):
    caplog.set_level(logging.DEBUG)
    nowhere = S3Objects(Location(**{**bucket, "endpoint": "http://127.0.0.1:9"}), timeout_s=0.2)
    with pytest.raises(TierUnavailable, match="cannot be used") as refused:
        nowhere.put("k", b"1")
    with pytest.raises(TierUnavailable, match="NoSuchBucket") as missing:
        S3Objects(Location(**{**bucket, "url": "s3://no-such-bucket"})).put("k", b"1")
    with pytest.raises(TierUnavailable, match="nobody"):
        S3Objects(Location(url="s3://weights", endpoint=server, credentials_profile="nobody"))
    said = caplog.text + str(refused.value) + str(missing.value)
    assert SECRET not in said and "AKIA" not in said
