"""Room made ahead: pages are there and mapped when a reservation comes, and nobody else pays for it."""

from weights.format.layout import Layout, TensorSpec
from weights.memory import segment
from weights.memory.store import WeightStore

LAYOUT = Layout.plan([TensorSpec("a", "F32", (64, 1024)), TensorSpec("b", "F32", (3, 1024))])


def test_a_reservation_takes_what_was_stocked_and_finds_it_mapped(tmp_path):
    store = WeightStore(tmp_path / "s", budget_bytes=None)
    assert store.stocked(LAYOUT) == {}
    assert store.stock(LAYOUT) and store.usage().draft_bytes == 0
    assert store.stock(LAYOUT), "it is there"
    assert store.usage().pool_bytes == LAYOUT.nbytes
    other = Layout.plan([TensorSpec("a", "BF16", (64, 1024))])
    assert store.stock(other) and store.stocked(other) and store.stocked(LAYOUT), "neither is made of the other"
    store.reserve(other, kind="version", model="m", version="1").commit(meta={})
    views = store.stocked(LAYOUT)
    for view in views.values():
        segment.populate(view, write=True)
    mapped = dict(segment._mapped)
    with store.reserve(LAYOUT, kind="snapshot", model="j", version="1") as draft:
        draft.view("a")[:4] = b"abcd"
        assert segment._mapped == mapped, "no new mapping"
        (name,) = views
        start = LAYOUT.find("a").start
        assert bytes(views[name][start : start + 4]) == b"abcd", "the very segment"
        assert store.usage().pool_bytes == 0
        attached = store.attach(draft.path, LAYOUT)
        assert bytes(attached.view("a")[:4]) == b"abcd" and attached.target == draft.target
        attached.close()


def test_nothing_is_stocked_where_a_reservation_would_then_find_no_room(tmp_path):
    store = WeightStore(tmp_path / "s", budget_bytes=2 * LAYOUT.nbytes - 1)
    assert not store.stock(LAYOUT) and store.usage().used_bytes == 0
    roomy = WeightStore(tmp_path / "s", budget_bytes=2 * LAYOUT.nbytes)
    assert roomy.stock(LAYOUT)
    # The pool is the first to go: a larger version still finds its room.
    larger = Layout.plan([TensorSpec("c", "F32", (120, 1024))])
    roomy.reserve(larger, kind="version", model="m", version="1").abort()
