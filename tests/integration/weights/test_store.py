"""Reserve, write, commit, lease, evict: the rules of docs/weight-store.md one by one."""

import fcntl
import os
import stat

import numpy as np
import pytest
import torch

from tests.unit.weights.conftest import SPECS, content, fill, write
from weights.format.errors import StoreError, VersionLeased
from weights.format.layout import Layout, TensorSpec
from weights.format.torch_views import as_tensor
from weights.memory import locks
from weights.memory.locks import DirectoryLock
from weights.memory.store import WeightStore

LAYOUT = Layout.plan(SPECS)
MIB = 1 << 20


def sized(nbytes: int) -> Layout:
    """A layout whose single file has exactly `nbytes` (a multiple of 64, header of 128 included)."""
    layout = Layout.plan([TensorSpec("w", "U8", (nbytes - 128,))])
    assert layout.nbytes == nbytes
    return layout


def put(store, name: str, nbytes: int = MIB, *, pinned: bool = False):
    draft = store.reserve(sized(nbytes), kind="version", model="m", version=name)
    draft.view("w")[:] = content("w", name, nbytes - 128)
    return draft.commit(meta={}, pinned=pinned)


def names(store) -> set[str]:
    return {stored.version for stored in store.list("version")}


def staged(store) -> list[str]:
    return os.listdir(store.root / "staging")


def test_aborted_draft_stays_while_writer_attached(store):
    draft = store.reserve(LAYOUT, kind="version", model="m", version="1")
    other = store.attach(draft.path, LAYOUT)
    draft.abort()
    store.sweep()
    assert len(staged(store)) == 1
    fill(other, "1")
    other.close()
    store.sweep()
    assert staged(store) == []
    with pytest.raises(StoreError, match="no draft"):
        store.attach(draft.path, LAYOUT)


def test_views_keep_lease_after_release(store):
    """Otherwise a tensor over released bytes would read the next version's bytes, or crash the process."""
    stored = write(store)
    lease = store.lease(stored)
    placed = lease.layout.find("model.norm.weight")
    tensor = as_tensor(lease.view("model.norm.weight"), "F32", (3,))
    array = np.frombuffer(lease.view("counter"), dtype=np.int64)
    assert lease.view("counter").readonly
    lease.release()
    assert lease.closed
    with pytest.raises(StoreError, match="closed"):
        lease.view("counter")
    with pytest.raises(VersionLeased):
        store.remove(stored)
    assert tensor.view(torch.uint8).numpy().tobytes() == content("model.norm.weight", "1", placed.nbytes)
    del tensor
    with pytest.raises(VersionLeased):
        store.remove(stored)
    del array
    store.remove(stored)


def test_eviction_removes_least_recently_used_first(root):
    store = WeightStore(root, budget_bytes=3 * MIB + MIB // 2)
    a, b, c = (put(store, name) for name in "abc")
    os.utime(a.path, ns=(1, 1))
    os.utime(b.path, ns=(2, 2))
    os.utime(c.path, ns=(3, 3))
    with store.lease(a):
        pass
    put(store, "d")
    assert names(store) == {"a", "c", "d"}
    assert store.usage().used_bytes <= 3 * MIB + MIB // 2


def test_lock_on_replaced_directory_is_not_taken(tmp_path, monkeypatch):
    """The directory is replaced by another one between open and lock."""
    path, flock = tmp_path / "v1", fcntl.flock
    path.mkdir()

    def replaced_meanwhile(fd, operation):
        flock(fd, operation)
        if not (tmp_path / "away").exists():
            path.rename(tmp_path / "away")
            path.mkdir()

    monkeypatch.setattr(locks.fcntl, "flock", replaced_meanwhile)
    assert DirectoryLock.try_exclusive(path) is None
    (tmp_path / "away").rmdir()
    held = DirectoryLock.try_shared(path)
    assert held is not None and os.fstat(held.fd).st_ino == path.stat().st_ino
    held.close()


def test_evict_trims_pool_only_as_needed(store):
    for stored in [put(store, name) for name in "ab"]:
        store.remove(stored)
    store.reserve(sized(MIB), kind="version", model="m", version="c").abort()
    assert store.usage().used_bytes == store.usage().pool_bytes == 2 * MIB
    assert store.evict(MIB) == store.usage().pool_bytes == MIB


def test_destroyed_segment_frees_memory_despite_mapping(store):
    """Cached mappings pin the inode, so a segment is truncated before it is unlinked."""
    stored = put(store, "a")
    path = stored.path / "model.safetensors"
    with open(path, "rb") as pinned:
        store.remove(stored)
        store.pool.trim(0)
        assert os.fstat(pinned.fileno()).st_nlink == 0
        assert os.fstat(pinned.fileno()).st_blocks == 0


def test_store_files_are_private_under_any_umask(root):
    old = os.umask(0)
    try:
        store = WeightStore(root, budget_bytes=None)
        write(store)
        draft = store.reserve(LAYOUT, kind="version", model="m", version="2")
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
        assert len(found) > 10 and found == {path: 0o700 if path.is_dir() else 0o600 for path in found}
        draft.abort()
    finally:
        os.umask(old)


def test_store_refuses_unsafe_root(tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    loose.chmod(0o755)
    with pytest.raises(StoreError, match="0700"):
        WeightStore(loose, budget_bytes=None)
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(StoreError, match="symlink"):
        WeightStore(tmp_path / "link", budget_bytes=None)


def test_room_bytes_count_evictable_versions(tmp_path):
    store = WeightStore(tmp_path / "store", budget_bytes=4 * MIB)
    assert store.room_bytes() == 4 * MIB
    put(store, "kept", pinned=True)
    put(store, "loose")
    assert 3 * MIB - 4096 < store.room_bytes() <= 3 * MIB  # less the manifest
    assert put(store, "all of it", store.room_bytes() // 64 * 64)
    assert names(store) == {"kept", "all of it"}
