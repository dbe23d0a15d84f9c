"""What the parts of `make gpu-smoke` for training compute, on a processor and small: right here means right there."""

from __future__ import annotations

import torch

from benchmarks.gpu import training
from train.methods import packed_objective
from train.state import copies

HOST = torch.device("cpu")


def test_a_snapshot_is_written_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PIECE_ELEMENTS", 1000)
    found = training.snapshots(HOST, 40_004, str(tmp_path))
    assert found["right"] and all(found[name] > 0 for name in ("out", "back", "link_out", "link_back"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(copies, "_repeat", lambda call, fd, at, memory: None)
    assert not training.snapshots(HOST, 40_004, str(tmp_path))["right"], "a copy that copies nothing"


def test_attention_is_compared_with_what_float32_computes():
    found = training.attention(HOST, tokens=128, heads=4, kv_heads=2, dim=16)
    assert 0 < found["attention_error"] < 0.02 and found["over_split"] > 0 and found["attention"] > 0


def test_a_heads_gradients_are_compared_with_what_float32_computes(monkeypatch):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 500 * 9)  # nine rows at a time
    found = training.head(HOST, tokens=100, width=64, vocabulary=500, checked_width=8)
    assert 0 < found["head_error"] < 0.02 and found["head"] > 0
