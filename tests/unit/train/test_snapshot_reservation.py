"""A draft reserved while a step goes on is there at its end, or every rank hears that it is not."""

from train.state.snapshot_reservation import SnapshotReservation, draft_name
from weights.format.errors import StoreFull
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

LAYOUT = Layout.plan([TensorSpec("a", "F32", (4, 4))])


def test_others_find_the_draft_by_its_number_and_what_is_not_needed_goes(tmp_path):
    store = WeightStore(tmp_path / "s", budget_bytes=None)

    def reserve(step, name):
        return store.reserve(LAYOUT, kind="snapshot", model="j", version=str(step), name=name, writers=2)

    ahead = SnapshotReservation("j", reserve)
    assert ahead.number(1) == 0, "nobody asked"
    ahead.begin(1)
    ahead.begin(1)
    number = ahead.number(1)
    assert 0 < number < 2**24 and float(number) == number
    attached = store.attach(store.draft_path(draft_name("j", number)), LAYOUT)
    assert attached.target.name == "1"
    attached.close()
    assert ahead.number(2) == 0
    ahead.begin(2)  # the snapshot of step 1 was not taken after all
    assert ahead.number(2) not in (0, number) and store.usage().draft_bytes == LAYOUT.nbytes + 2 + held_json(store)
    ahead.drop()
    assert store.usage().draft_bytes == 0 and ahead.number(2) == 0


def test_a_full_store_is_left_to_the_step_boundary(tmp_path):
    def reserve(step, name):
        raise StoreFull(
            needed_bytes=2, used_bytes=1, budget_bytes=1, free_bytes=0, leased_bytes=0, pinned_bytes=0, draft_bytes=0
        )

    ahead = SnapshotReservation("j", reserve)
    ahead.begin(1)
    assert ahead.number(1) == 0 and ahead.take() is None


def held_json(store):
    (draft,) = (store.root / "staging").iterdir()
    return sum((draft / name).stat().st_size for name in (".draft.json", ".manifest-room"))
