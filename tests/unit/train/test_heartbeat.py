"""What takes long because there is much of it is not taken for a hang: the heartbeat sees that it moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import ControlSignals, Progress
from train.model.tensor_parallel import Grid
from train.trainer import train as training
from train.trainer.metrics import Metrics
from train.trainer.train import Run


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


@pytest.mark.parametrize(("wanted", "takes_s"), [(False, 60.0), (True, 60.0), (True, 0.0)])
def test_long_validation_moves_with_each_row_and_is_left(
    world_of_one,  # noqa: F811
    progress,
    monkeypatch,
    tmp_path,
    wanted,
    takes_s,
):
    run: Any = Run.__new__(Run)
    now_s = iter(n * takes_s for n in range(100))
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    run.progress, run.grid, run.signals = progress, Grid(0, 1), ControlSignals(suspend=wanted)
    valid: Any = SimpleNamespace(packs=range(5), row=lambda packs: packs)
    run.method = SimpleNamespace(
        denominator=lambda tokens, packs: len(packs),
        metric_names=(),
        needs_divergence=False,
        peak_names=(),
        batch=lambda row, scale, device: {"loss": torch.tensor(float(row[0]) * scale)},
    )

    class Engine:
        device, module = torch.device("cpu"), SimpleNamespace(take_metrics=lambda: ([3, 4], []))
        eval = train = lambda self: None

        def __call__(self, batch):
            return batch["loss"]

    run.engine = Engine()
    spec = host_spec(run_dir=str(tmp_path))
    run.metrics = Metrics(spec, run.method, run.engine, run.grid, lambda event, **data: None)
    left = wanted and takes_s > 0
    found = run._validation(valid)
    assert progress.entered == ["validating"] * (0 if left else 5)
    assert found == (None if left else {"loss": pytest.approx(np.mean(range(5))), "mean_token_accuracy": 0.75})
