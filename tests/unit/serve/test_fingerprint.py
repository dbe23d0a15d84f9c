"""One token of a loaded version against what training recorded."""

from __future__ import annotations

import pytest

from serve.core.errors import FingerprintMismatch, NotFinite
from serve.core.fingerprint import Record, check, record_of
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

RECORD = Record((1, 2), 7, -0.5)
ANSWER = {7: -0.5, 9: -1.5}
NAN = float("nan")


def checked(answer, record=RECORD):
    return check(answer, record, tolerance=0.15, what="v")


@pytest.mark.parametrize("answer", [ANSWER, {7: -0.6, 9: -0.59}], ids=["equal", "near tie"])
def test_check_of_the_recorded_token_verifies(answer):
    assert checked(answer) == {"token": 7, "logprob": answer[7], "verdict": "verified"}


@pytest.mark.parametrize("answer", [{7: -0.8, 9: -1.5}, {8: -0.5, 9: -1.5}], ids=["other logprob", "other token"])
def test_check_of_other_weights_raises_mismatch(answer):
    with pytest.raises(FingerprintMismatch):
        checked(answer)


@pytest.mark.parametrize("record", [RECORD, None])
def test_check_of_nan_raises_not_finite(record):
    with pytest.raises(NotFinite):
        checked({7: NAN, 9: -1.5}, record)


def test_check_without_a_record_claims_nothing():
    assert checked(ANSWER, None) == {"verdict": "unrecorded"}


def test_record_of_reads_what_the_manifest_has(tmp_path):
    assert record_of(tmp_path) is None
    store = WeightStore(tmp_path, budget_bytes=None)
    layout = Layout.plan([TensorSpec("w", "F32", (1,))])
    for name, meta in (("v1", {}), ("v2", {"fingerprint": {"prompt": [1, 2], "token": 7, "logprob": -0.5}})):
        with store.reserve(layout, kind="version", model="m", version=name) as draft:
            stored = draft.commit(meta=meta)
        assert record_of(stored.path) == (RECORD if meta else None)
