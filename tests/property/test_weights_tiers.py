"""Retention keeps what it must and comes to rest; the codec gives back what it got."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weights.format.config import KeepRules
from weights.tiers import codec
from weights.tiers.retention import Kept, keep, plan_tier

RULES = st.builds(
    KeepRules,
    keep_last=st.none() | st.integers(1, 5),
    keep_best=st.none() | st.integers(1, 5),
)
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
def test_what_is_protected_or_asked_for_stays_and_the_rest_goes(records, rules):
    kept = keep(records, rules)
    assert {record.key for record in records if record.protected} <= kept <= {record.key for record in records}
    for family in "ab":
        mine = sorted((r for r in records if r.family == family), key=lambda r: -r.created_s)
        measured = [r for r in mine if r.valid_loss is not None]
        for rank, record in enumerate(mine):
            newer = rank
            better = sum(other.valid_loss < record.valid_loss for other in measured) if record in measured else 99
            if not (
                rules.keeps_everything
                or record.protected
                or newer < (rules.keep_last or 0)
                or better < (rules.keep_best or 0)
            ):
                assert record.key not in kept
        assert {r.key for r in mine[: rules.keep_last or 0]} <= kept
        if rules.keep_best and measured:
            assert min(measured, key=lambda r: r.valid_loss).valid_loss in {r.valid_loss for r in mine if r.key in kept}
        if rules.keeps_everything:
            assert {r.key for r in mine} <= kept


@given(
    RECORDS,
    st.lists(st.sampled_from(["above", "here", "both"]), min_size=30, max_size=30),
    st.sets(st.integers(2 * 10**6, 3 * 10**6), max_size=5),
    RULES,
)
def test_a_tier_comes_to_rest_after_its_plan(records, places, foreign, rules):
    above = [record for record, place in zip(records, places, strict=False) if place != "here"]
    described = {r.key: r for r, place in zip(records, places, strict=False) if place != "above"}
    plan = plan_tier(above, {*described, *foreign}, described, rules)
    assert not foreign & set(plan.drop), "what nobody knows is left alone"
    assert len(set(plan.push)) == len(plan.push) and not set(plan.push) & {*described, *foreign}
    judged = described | {record.key: record for record in above}
    pushed = [judged[key].created_s for key in plan.push]
    assert pushed == sorted(pushed, reverse=True), "the newest is safe first"
    assert not any(judged[key].protected for key in plan.drop)
    after = ({*described, *foreign} | set(plan.push)) - set(plan.drop)
    candidates = {record.key: record for record in above}
    again = plan_tier(above, after, described | candidates, rules)
    assert again.push == () and again.drop == ()


@given(st.binary(max_size=5000), st.sampled_from([1, 2, 4, 8]))
def test_lossless_means_lossless(data, width):
    blob = codec.encode(data, codec="zstd", width=width)
    assert bytes(codec.decode(blob, name="x")) == data
    assert blob == codec.encode(data, codec="zstd", width=width), "its name is made from it"


@given(st.binary(max_size=300))
def test_no_bytes_are_mistaken_for_an_object_without_notice(data):
    try:
        codec.decode(data, name="x")
    except codec.ObjectDamaged:
        return
    assert data[:4] == b"AWO1"
