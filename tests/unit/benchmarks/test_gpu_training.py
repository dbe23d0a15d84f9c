"""What the parts of `make gpu-smoke` for training compute, on a processor and small: right here means right there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.gpu import training
from train.methods import packed_objective
from train.model import attention as packed
from train.state import copies

HOST = torch.device("cpu")


def test_a_snapshot_is_written_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PIECE_ELEMENTS", 1000)
    found = training.snapshots(HOST, 40_004, str(tmp_path))
    assert found["right"] and all(found[name] > 0 for name in ("out", "back", "link_out", "link_back"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(copies, "_copy", lambda target, source: None)
    assert not training.snapshots(HOST, 40_004, str(tmp_path))["right"], "a copy that copies nothing"


def test_attention_is_compared_with_what_float32_computes_windows_included():
    found = training.attention(HOST, tokens=128, heads=4, kv_heads=2, dim=16)
    assert 0 < found["attention_error"] < 0.02 and found["over_split"] > 0 and found["attention"] > 0

    exact = packed.packed_attention

    def loses_narrow_values(*given, **named):
        out, weights = exact(*given, **named)
        lost = given[1].dtype == torch.bfloat16 and given[3].shape[-1] < given[1].shape[-1]
        return out * 0 if lost else out, weights

    with mock.patch.object(packed, "packed_attention", loses_narrow_values):
        assert training.attention(HOST, tokens=128, heads=4, kv_heads=2, dim=16)["attention_error"] > 0.1

    def forgets_windows(*given, **named):
        return exact(*given, **{**named, "sliding_window": None if given[1].dtype == torch.bfloat16 else 2})

    with mock.patch.object(packed, "packed_attention", forgets_windows):
        assert training.attention(HOST, tokens=128, heads=4, kv_heads=2, dim=16)["attention_error"] > 0.1


def test_a_heads_gradients_are_compared_with_what_float32_computes(monkeypatch):
    small = {"tokens": 100, "width": 64, "vocabulary": 500, "checked_width": 8}
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 500 * 9)  # nine rows at a time
    found = training.head(HOST, **small)
    assert 0 < found["head_error"] < 0.02 and found["head"] > 0
    multiply, ended = packed_objective.HeadGradient._multiply, []

    def forgets_the_first(self):
        multiply(self)
        if self not in ended:
            ended.append(self)
            self._sum.zero_()

    monkeypatch.setattr(packed_objective.HeadGradient, "_multiply", forgets_the_first)
    assert training.head(HOST, **small)["head_error"] > 0.1


@pytest.mark.parametrize("of", [1, 3])
def test_ranks_learn_each_its_own_examples_and_share_one_loss(of):
    rows = [training._batch(rank, of, 64, 100, HOST) for rank in range(of)]
    assert len({tuple(row["labels"].tolist()) for row in rows}) == of
    assert sum(row["scale"] * len(row["labels"]) for row in rows) == pytest.approx(1)
    for row in rows:
        ids, at = row["input_ids"][0], row["predict_at"]
        assert torch.equal(row["labels"], ids[at + 1]) and 31 not in at.tolist(), "no example predicts the next one"
        assert row["position_ids"][0, [0, 31, 32, 63]].tolist() == [0, 31, 0, 31]
