"""Retention keeps what it must and comes to rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.tiers.tiers import Kept, keep
from weights.format.config import KeepRules

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
def test_keep_is_newest_first_and_comes_to_rest(records, rules):
    kept = keep(records, rules)
    created = {record.key: record.created_s for record in records}
    assert [created[key] for key in kept] == sorted((created[key] for key in kept), reverse=True)
    assert keep([record for record in records if record.key in kept], rules) == kept
