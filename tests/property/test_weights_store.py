"""Compares the store with a model of it for any order of operations; retention keeps the right records."""

import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from appliance.tiers.tiers import Kept, keep
from weights.format.config import KeepRules
from weights.format.errors import StoreFull, VersionExists, VersionLeased, VersionNotFound
from weights.format.layout import Layout, TensorSpec
from weights.memory.lease import unpin
from weights.memory.segment import mappings
from weights.memory.store import WeightStore

SIZES = (70_000, 140_000, 300_000)
# Manifests and pin files are written at commit without a reservation; they are small and bounded.
SLACK_BYTES = 50_000


def content(model: str, version: str, size: int) -> bytes:
    return hashlib.shake_128(f"{model}/{version}/{size}".encode()).digest(size)


class StoreMachine(RuleBasedStateMachine):
    drafts = Bundle("drafts")
    leases = Bundle("leases")

    @initialize(budget=st.sampled_from([None, 400_000, 900_000]))
    def begin(self, budget):
        self.directory = tempfile.TemporaryDirectory()
        self.budget = budget
        self.store = WeightStore(Path(self.directory.name) / "store", budget_bytes=budget)
        self.committed = {}  # (model, version) -> (stored, size, pinned)
        self.leased = {}  # (model, version) -> number of leases
        self.open_drafts = 0

    @rule(target=drafts, model=st.sampled_from("ab"), version=st.sampled_from("123"), size=st.sampled_from(SIZES))
    def reserve(self, model, version, size):
        layout = Layout.plan([TensorSpec("w", "U8", (size,)), TensorSpec("n", "F32", (3,))])
        try:
            draft = self.store.reserve(layout, kind="version", model=model, version=version)
        except VersionExists:
            assert (model, version) in self.committed
            return multiple()
        except StoreFull as error:
            assert self.budget is not None and f"no room for {layout.nbytes} bytes" in str(error)
            self._note_evictions()
            return multiple()
        self._note_evictions()
        self.open_drafts += 1
        self.store.attach(draft.path, layout).view("w")[:] = content(model, version, size)
        draft.view("n")[:] = b"\x07" * 12
        return draft

    @rule(draft=consumes(drafts), pinned=st.booleans())
    def commit(self, draft, pinned):
        key = draft.name[1:]
        self.open_drafts -= 1
        try:
            stored = draft.commit(meta={"k": 1}, pinned=pinned)
        except VersionExists:
            assert key in self.committed
            draft.abort()
            return
        assert key not in self.committed
        self.committed[key] = (stored, draft.layout.find("w").nbytes, pinned)

    @rule(draft=consumes(drafts))
    def abort(self, draft):
        draft.abort()
        self.open_drafts -= 1

    @rule(draft=consumes(drafts))
    def writer_dies(self, draft):
        draft._lock.close()  # as the kernel does
        self.open_drafts -= 1

    @precondition(lambda self: self.committed)
    @rule(target=leases, data=st.data())
    def lease(self, data):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        self.leased[key] = self.leased.get(key, 0) + 1
        lease = self.store.lease(self.committed[key][0])
        lease.view("w")
        return key, lease

    @rule(held=consumes(leases))
    def release(self, held):
        key, lease = held
        lease.release()
        self.leased[key] -= 1

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def remove(self, data):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        stored = self.committed[key][0]
        if self.leased.get(key):
            with pytest.raises(VersionLeased):
                self.store.remove(stored)
            return
        self.store.remove(stored)
        del self.committed[key]
        with pytest.raises(VersionNotFound):
            self.store.lease(stored)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(sorted(self.committed)))
        stored, size, _ = self.committed[key]
        unpin(stored)
        self.committed[key] = (stored, size, False)

    @rule(nbytes=st.sampled_from([1, 100_000, 1 << 40]))
    def evict(self, nbytes):
        before = self.store.usage().used_bytes
        freed = self.store.evict(nbytes)
        assert before - self.store.usage().used_bytes == freed
        self._note_evictions()
        if freed < nbytes:
            assert all(pinned or self.leased.get(key) for key, (_, _, pinned) in self.committed.items())
            assert self.store.usage().pool_bytes == 0

    @rule()
    def sweep(self):
        self.store.sweep()
        assert len(os.listdir(self.store.root / "staging")) == self.open_drafts

    @invariant()
    def committed_versions_are_intact(self):
        if not hasattr(self, "store"):
            return
        found = {(stored.model, stored.version): stored for stored in self.store.list("version")}
        assert set(found) == set(self.committed)
        for key, (stored, size, pinned) in self.committed.items():
            assert found[key].pinned == pinned
            if not self.leased.get(key):
                before = os.stat(stored.path)
                with self.store.lease(stored) as lease:
                    assert bytes(lease.view("w")) == content(*key, size)
                    assert bytes(lease.view("n")) == b"\x07" * 12
                os.utime(stored.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @invariant()
    def bounds_hold(self):
        if not hasattr(self, "store"):
            return
        usage = self.store.usage()
        if self.budget is not None:
            assert usage.used_bytes <= self.budget + SLACK_BYTES

    def _note_evictions(self):
        """Check that only unleased, unpinned versions were evicted."""
        for key in list(self.committed):
            stored, _, pinned = self.committed[key]
            if self.store.find("version", *key) is None:
                assert not pinned and not self.leased.get(key), f"{key} must not have been evicted"
                del self.committed[key]

    def teardown(self):
        if hasattr(self, "directory"):
            mappings.clear()
            self.directory.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestStore = StoreMachine.TestCase


RULES = st.builds(KeepRules, keep_last=st.none() | st.integers(1, 5), keep_best=st.none() | st.integers(1, 5))
RECORDS = st.lists(
    st.builds(
        Kept,
        key=st.integers(0, 10**6),
        family=st.sampled_from("ab"),
        created_s=st.floats(0, 1e6),
        valid_loss=st.none() | st.floats(0, 10),
        protected=st.sampled_from([False, False, True]),
    ),
    unique_by=lambda record: record.key,
    max_size=30,
)


@given(RECORDS, RULES)
def test_keep_returns_exactly_protected_and_ruled_records(records, rules):
    kept = set(keep(records, rules))
    assert {record.key for record in records if record.protected} <= kept <= {record.key for record in records}
    for family in "ab":
        mine = sorted((r for r in records if r.family == family), key=lambda r: -r.created_s)
        measured = [r for r in mine if r.valid_loss is not None]
        for rank, record in enumerate(mine):
            newer = rank
            better = sum(other.valid_loss < record.valid_loss for other in measured) if record in measured else 99
            if not (
                rules == KeepRules()
                or record.protected
                or newer < (rules.keep_last or 0)
                or better < (rules.keep_best or 0)
            ):
                assert record.key not in kept
        assert {r.key for r in mine[: rules.keep_last or 0]} <= kept
        if rules.keep_best and measured:
            assert min(measured, key=lambda r: r.valid_loss).valid_loss in {r.valid_loss for r in mine if r.key in kept}
        if rules == KeepRules():
            assert {r.key for r in mine} <= kept


@given(RECORDS, RULES)
def test_keep_is_newest_first_and_idempotent(records, rules):
    kept = keep(records, rules)
    created = {record.key: record.created_s for record in records}
    assert [created[key] for key in kept] == sorted((created[key] for key in kept), reverse=True)
    assert keep([record for record in records if record.key in kept], rules) == kept
