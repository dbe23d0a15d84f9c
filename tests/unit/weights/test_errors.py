"""Errors cross process boundaries and keep what they say."""

from __future__ import annotations

import pickle

import pytest

from weights.checkpoint.folder import NotACheckpoint
from weights.format.errors import IntegrityError, StoreFull


@pytest.mark.parametrize(
    "error",
    [
        StoreFull("no room"),
        IntegrityError("bad", path="/p", file="f"),
        NotACheckpoint("config.json", "has 'auto_map'"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
