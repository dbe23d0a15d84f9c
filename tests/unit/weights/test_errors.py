"""Errors cross process boundaries and keep what they say."""

from __future__ import annotations

import pickle

import pytest

from weights.format.errors import IntegrityError, StoreFull, UnknownTensor, VersionExists


@pytest.mark.parametrize(
    "error",
    [
        StoreFull(needed_bytes=5, used_bytes=4, budget_bytes=3, free_bytes=2, leased_bytes=1),
        StoreFull(needed_bytes=5, used_bytes=4, budget_bytes=None, free_bytes=2),
        IntegrityError("bad", path="/p", file="f", tensor="t"),
        UnknownTensor("x"),
        VersionExists("taken"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
