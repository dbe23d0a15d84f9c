"""One token of a loaded version against what training recorded."""

from __future__ import annotations

import pytest

from serve.core.errors import FingerprintMismatch, VersionBroken, WithoutNumbers
from serve.load.version_check import Token, check_token, recorded_token
from weights.format.layout import Layout, TensorSpec
from weights.memory.store import WeightStore

RECORD = Token((1, 2), 7, -0.5)
ANSWER = {7: -0.5, 9: -1.5}
NAN = float("nan")


def checked(answer, record=RECORD):
    return check_token(answer, record, tolerance=0.15, what="v")


@pytest.mark.parametrize("answer", [ANSWER, {7: -0.6, 9: -0.59}], ids=["equal", "near tie"])
def test_check_of_the_recorded_token_verifies(answer):
    assert checked(answer) == {"token": 7, "logprob": answer[7], "verdict": "verified"}


@pytest.mark.parametrize("answer", [{7: -0.8, 9: -1.5}, {8: -0.5, 9: -1.5}], ids=["other logprob", "other token"])
def test_check_of_other_weights_raises_mismatch(answer):
    with pytest.raises(FingerprintMismatch):
        checked(answer)


@pytest.mark.parametrize("record", [RECORD, None])
def test_check_of_nan_raises_not_finite(record):
    with pytest.raises(VersionBroken):
        checked({7: NAN, 9: -1.5}, record)


def test_check_without_a_record_claims_nothing():
    assert checked(ANSWER, None) == {"verdict": "unrecorded"}


@pytest.fixture
def sealed(tmp_path):
    """Path of a version with this `meta`."""

    def seal(meta):
        layout = Layout.plan([TensorSpec("w", "F32", (1,))])
        with WeightStore(tmp_path, budget_bytes=None).reserve(layout, kind="version", model="m", version="v1") as draft:
            return draft.commit(meta=meta).path

    return seal


def test_record_of_a_version_without_one_is_none(tmp_path, sealed):
    assert recorded_token(tmp_path) is None and recorded_token(sealed({})) is None


def test_record_of_reads_what_the_manifest_has(sealed):
    assert recorded_token(sealed({"fingerprint": {"prompt": [1, 2], "token": 7, "logprob": -0.5}})) == RECORD


def test_record_of_a_version_that_trained_to_nan_raises_without_numbers(sealed):
    with pytest.raises(WithoutNumbers):
        recorded_token(sealed({"fingerprint": None}))
