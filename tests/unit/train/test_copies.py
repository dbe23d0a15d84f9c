"""A rank's copies into a snapshot are few where memory allows, and right where it does not."""

import torch

from train.state.copies import CopyPlan
from weights.format.layout import Layout, TensorSpec
from weights.format.slices import Strided, narrow, part
from weights.format.torch_views import as_tensor
from weights.memory.store import WeightStore


def written(tmp_path, layout, pieces):
    plan = CopyPlan.of(layout, pieces)
    store = WeightStore(tmp_path / "store", budget_bytes=None)
    with store.reserve(layout, kind="snapshot", model="j", version="1") as draft:
        for placed in layout:
            draft.view(placed.spec.name)[:] = bytes(placed.nbytes)
        plan.write(draft)
        stored = draft.commit(meta={})
    with store.lease(stored) as lease:
        found = {p.spec.name: as_tensor(lease.view(p.spec.name), "F32", p.spec.shape).clone() for p in layout}
        ours = [ours.clone() for _, _, ours in pieces]
        for _, _, memory in pieces:
            memory.zero_()
        plan.read(lease)
        assert all(torch.equal(memory, was) for (_, _, memory), was in zip(pieces, ours, strict=True))
    return plan, found


def test_what_lies_side_by_side_on_both_sides_is_one_move(tmp_path):
    layout = Layout.plan([TensorSpec(f"{kind}.{n}", "F32", (3000, 700)) for kind in "ab" for n in range(3)])
    flats = {kind: torch.randn(3 * 2_100_000) for kind in "ab"}
    # The rank owns the end of the first parameter, all of the second and the beginning of the third; told by parameter.
    pieces = []
    for n, (first, last) in enumerate(((1_000_001, 2_100_000), (0, 2_100_000), (0, 777))):
        for kind, flat in flats.items():
            whole = flat[n * 2_100_000 : (n + 1) * 2_100_000]
            pieces.append((f"{kind}.{n}", Strided(first, last - first, last - first, 1), whole[first:last]))
    plan, found = written(tmp_path, layout, pieces)
    assert [move.runs.size for move in plan.moves] == [1_099_999 + 2_100_000 + 777] * 2
    for kind, first in ((kind, n) for kind in "ab" for n in range(3)):
        assert torch.count_nonzero(found[f"{kind}.{first}"]) > 0


def test_gaps_other_storages_and_columns_stay_moves_of_their_own(tmp_path):
    layout = Layout.plan(
        [TensorSpec("a", "F32", (16, 4)), TensorSpec("b", "F32", (16, 4)), TensorSpec("odd", "F32", (3,))]
    )
    flat, other, columns, odd = torch.randn(64), torch.randn(40), torch.randn(32), torch.randn(3)
    runs = narrow((16, 4), 1, 2, 2)  # the last two columns of b
    (whole_columns,) = part(runs, 0, 32)
    pieces = [
        ("a", Strided(0, 16, 16, 1), flat[:16]),
        ("a", Strided(20, 4, 4, 1), flat[16:20]),  # a gap in the snapshot
        ("a", Strided(24, 40, 40, 1), other),  # another storage
        ("b", whole_columns, columns),
        ("odd", Strided(0, 3, 3, 1), odd),
    ]
    plan, found = written(tmp_path, layout, pieces)
    assert len(plan.moves) == 5
    expected = torch.zeros(64)
    expected[:16], expected[20:24], expected[24:] = pieces[0][2], pieces[1][2], pieces[2][2]
    assert torch.count_nonzero(found["b"][:, :2]) == 0 and torch.count_nonzero(found["b"][:, 2:]) == 32
    assert torch.count_nonzero(found["odd"]) == 3 and torch.count_nonzero(found["a"]) == 60
