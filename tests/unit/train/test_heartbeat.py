"""What takes long because there is much of it is not taken for a hang: the heartbeat sees that it moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import ControlSignals, Progress
from train.model.tensor_parallel import Grid
from train.run import loop
from train.run.loop import Run
from train.run.prepare import moving


class Clocked(Progress):
    """Keeps every phase that was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []

    def enter(self, phase: str, step: int | None = None) -> None:
        self.entered.append(phase)
        super().enter(phase, step)


@pytest.fixture
def progress() -> Clocked:
    return Clocked()


def test_each_example_that_is_tokenised_moves(progress):
    encode = moving(lambda encoder, record: [(encoder, record["n"])], progress)
    assert [encode("e", {"n": n}) for n in range(3)] == [[("e", 0)], [("e", 1)], [("e", 2)]]
    assert progress.entered == ["tokenising"] * 3


@pytest.mark.parametrize(("wanted", "takes_s"), [(False, 60.0), (True, 60.0), (True, 0.0)])
def test_each_row_of_a_validation_moves_and_a_long_one_is_left(world_of_one, progress, monkeypatch, wanted, takes_s):  # noqa: F811
    """Devices that were wanted came at the end of a validation, however large its file was."""
    run: Any = Run.__new__(Run)
    told = []
    now_s = iter(np.arange(100) * takes_s)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    run.progress, run.rollouts, run.grid, run.rank = progress, None, Grid(0, 1), 0
    run.signals = ControlSignals(suspend=wanted)
    run.valid = SimpleNamespace(packs=range(5), row=lambda packs: packs)
    run.method = SimpleNamespace(
        denominator=lambda tokens, packs: len(packs),
        metric_names=(),
        hits=lambda module: [3, 4],
        metrics=lambda module: [],
        peaks=lambda module: [],
        batch=lambda row, scale, device: torch.tensor(float(row[0]) * scale),
    )

    class Engine:
        device, module = torch.device("cpu"), None
        eval = train = lambda self: None

        def __call__(self, batch):
            return batch

    run.engine, run._tell_validation = Engine(), told.append
    run._validate()
    left = wanted and takes_s > 0
    assert progress.entered == ["validating"] * (0 if left else 5)
    assert told == [None if left else {"loss": pytest.approx(np.mean(range(5))), "mean_token_accuracy": 0.75}]
