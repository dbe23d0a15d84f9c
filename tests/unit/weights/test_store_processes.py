"""A store shared by several processes, some of them killed with SIGKILL."""

import itertools
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.unit.weights.conftest import SPECS, check, content, deadly, fill, write
from weights.format.errors import StoreError, StoreFull
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

LAYOUT = Layout.plan(SPECS)
# System calls that change the store -> step between tested calls. Testing every `open` would take a minute.
CHANGES = dict.fromkeys(("rename", "unlink", "mkdir", "rmdir", "truncate", "ftruncate", "posix_fallocate"), 1)
CHANGES |= {"open": 5}


def start_child(work) -> int:
    """Run `work` in a forked child; return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def in_child(work) -> int:
    """Run `work` in a forked child; return its wait status."""
    return os.waitpid(start_child(work), 0)[1]


def test_sweep_removes_only_drafts_of_killed_writers(store, root):
    stored = write(store)
    before = store.usage()
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        draft = WeightStore(root, budget_bytes=None).reserve(LAYOUT, kind="version", model="starter", version="2")
        fill(draft, "2")
        os.write(writing, str(draft.path).encode())
        signal.pause()
    path = Path(os.read(reading, 4096).decode())
    store.sweep()
    assert path.exists(), "its writer lives"
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert store.find("version", "starter", "2") is None
    store.sweep()
    assert not path.exists()
    assert store.usage() == before
    check(store, stored)


def test_fork_closes_handles_in_child(store):
    stored = write(store)
    draft = store.reserve(LAYOUT, kind="version", model="m", version="2")
    lease = store.lease(stored)

    def child():
        assert draft.closed and lease.closed  # so that it does not hold memory that its parent releases
        for use in (lambda: draft.view("counter"), lambda: lease.view("counter"), lambda: draft.commit(meta={})):
            try:
                use()
            except StoreError:
                continue
            raise AssertionError("a forked child used its parent's handle")
        draft.abort()  # must not remove the parent's draft
        again = store.attach(draft.path, LAYOUT)
        fill(again, "2")
        again.close()

    assert in_child(child) == 0
    assert not draft.closed and not lease.closed
    check(store, draft.commit(meta={}))


@pytest.mark.parametrize("change", CHANGES)
def test_store_survives_kill_at_every_change(root, change):
    """SIGKILL before the n-th call of `change` keeps committed versions whole; one sweep removes the rest.

    The child reserves, writes, commits, removes, evicts and reuses segments."""
    budget_bytes = 4 * (1 << 20)
    layout = Layout.plan([*SPECS, TensorSpec("pad", "U8", (1 << 20,))])

    def life(limit):
        store = WeightStore(root, budget_bytes=budget_bytes)
        setattr(os, change, partial(deadly, limit, itertools.count(), getattr(os, change)))
        for round_number in range(2):
            for version in ("a", "b", "c", "d"):
                with store.reserve(layout, kind="version", model="m", version=version) as draft:
                    fill(draft, version)
                    stored = draft.commit(meta={}, pinned=False)
                if version == "c":
                    store.remove(stored)
            if round_number == 0:
                store.remove(store.find("version", "m", "d"))
                store.evict(1 << 40)

    keeper = WeightStore(root, budget_bytes=None)
    kept = write(keeper, "kept", pinned=True)
    for limit in itertools.count(0, CHANGES[change]):
        status = in_child(lambda limit=limit: life(limit))
        store = WeightStore(root, budget_bytes=budget_bytes)
        check(store, kept)
        store.sweep()
        assert os.listdir(root / "staging") == []
        for stored in store.list("version"):
            check(store, stored)
            if stored.version != "kept":
                store.remove(stored)
        usage = store.usage()
        assert usage.draft_bytes == 0 and usage.used_bytes <= budget_bytes
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if limit % 3 == 0:
            store.pool.trim(0)  # so that the kill hits both new and reused segments
    assert limit > 0


def test_two_processes_never_exceed_budget(root):
    budget_bytes = 6 * (1 << 20)
    layout = Layout.plan([TensorSpec("w", "U8", (1 << 20,))])
    over = root.parent / "over"

    def churn(who):
        store = WeightStore(root, budget_bytes=budget_bytes)
        for number in range(25):
            try:
                with store.reserve(layout, kind="version", model=who, version=str(number)) as draft:
                    # Without the mutex, a segment that another process moves could count twice.
                    with store.mutex():
                        used_bytes = store.usage().used_bytes
                    if used_bytes > budget_bytes + 64_000:  # manifests need no reservation
                        over.touch()
                    draft.view("w")[:16] = content("w", str(number), 16)
                    draft.commit(meta={}, pinned=False)
            except StoreFull:
                continue

    pids = [start_child(partial(churn, who)) for who in ("a", "b")]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert not over.exists()
    assert os.listdir(root / "staging") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_reserve_on_full_tmpfs_raises_store_full(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", mount], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        store = WeightStore(mount / "store", budget_bytes=None)
        kept = write(store, "kept")
        size = Layout.plan([TensorSpec("w", "U8", (5 << 20,))])
        draft = store.reserve(size, kind="version", model="m", version="1")
        with pytest.raises(StoreFull):
            store.reserve(size, kind="version", model="m", version="2")
        draft.view("w")[:] = content("w", "1", 5 << 20)  # no SIGBUS: the memory is reserved
        first = draft.commit(meta={}, pinned=False)
        assert os.listdir(store.root / "staging") == []
        check(store, kept)
        check(store, first)
        second = store.reserve(size, kind="version", model="m", version="2")  # evicts the first version
        second.view("w")[:] = content("w", "2", 5 << 20)
        second = second.commit(meta={"job": "j" * 8000})
        assert store.find("version", "m", "1") is None
        check(store, kept)
        check(store, second)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
