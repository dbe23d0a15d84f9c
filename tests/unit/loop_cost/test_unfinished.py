"""However much has been begun and has not ended, no round of the loop works on all of it: not when an engine answers a
line, not when gateways report, not in a look of whatever sees jobs through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.loop_cost.exceptions import HOLDS_UNFINISHED
from tests.unit.loop_cost.test_object_size import too_much
from tests.unit.loop_cost.unfinished import BOUNDS, CANARIES, Unfinished, measure


@pytest.mark.timeout(600)
def test_no_round_of_the_loop_works_on_all_that_goes_on(tmp_path: Path):
    """One test: of several each worker that has one would measure anew, for half a minute. What grows with the number
    of owners is for those that have twelve."""
    counted = measure(tmp_path / "box", owners=1)
    as_much_as_owners_may_begin(counted)
    compare(counted)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nor_of_what_twelve_owners_have_begun(tmp_path: Path):
    compare(measure(tmp_path / "box", owners=12))


def compare(counted: Unfinished) -> None:
    wrong = {}
    for name, told in counted.told.items():
        allowed = {
            one for pattern, (counts, _) in HOLDS_UNFINISHED.items() if re.search(pattern, name) for one in counts
        }
        if found := {one: number for one, number in too_much(told.round).items() if one not in allowed}:
            wrong[name] = found
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def as_much_as_owners_may_begin(counted: Unfinished) -> None:
    assert counted.begun["batches"] == BOUNDS.batches
    assert counted.begun["responses"] == BOUNDS.background
    assert counted.begun["jobs"] == BOUNDS.jobs
    assert counted.begun["canaries"] == CANARIES
    assert counted.begun["uploads"] == BOUNDS.uploads
    assert counted.begun["wanted models"] >= BOUNDS.background
