"""The training parts of `make gpu-smoke`, computed on a small CPU workload."""

import torch

from benchmarks.gpu import training
from train.methods import packed_objective
from train.state import copies

HOST = torch.device("cpu")


def by_name(checks):
    return {check.name: check for check in checks}


def test_snapshots_check_fails_if_nothing_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PIECE_ELEMENTS", 1000)
    assert by_name(training.snapshots(HOST, 40_004, str(tmp_path)))["snapshot is right"].ok
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(copies, "_repeat", lambda call, fd, at, memory: None)
    assert not by_name(training.snapshots(HOST, 40_004, str(tmp_path)))["snapshot is right"].ok


def test_attention_matches_float32():
    found = by_name(training.attention(HOST, tokens=128, heads=2, kv_heads=1, dim=8))
    assert found["attention's error"].ok and found["attention's error"].found > 0


def test_head_gradients_match_float32(monkeypatch):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 50 * 9)  # chunks of nine rows
    error = by_name(training.head(HOST, tokens=30, width=16, vocabulary=50, checked_width=8))["loss head's error"]
    assert error.ok and error.found > 0
