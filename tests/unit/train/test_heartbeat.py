"""What takes long because there is much of it is not taken for a hang: the heartbeat sees that it moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import Progress
from train.model.tensor_parallel import Grid
from train.run.general_answers import GeneralQuestions
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


def test_each_look_between_general_questions_moves(progress):
    device = torch.device("cpu")
    questions = GeneralQuestions(SimpleNamespace(), None, Grid(0, 1), device, 0, lambda *_, **__: None, progress)
    wanted = questions._moving(iter([False, True]).__next__)
    assert (wanted(), wanted()) == (False, True) and progress.entered == ["asking"] * 2


def test_each_row_of_a_validation_moves(world_of_one, progress):  # noqa: F811
    run: Any = Run.__new__(Run)
    told = []
    run.progress, run.rollouts, run.grid = progress, None, Grid(0, 1)
    run.spec = SimpleNamespace(validation_batches=0, micro_batch=1)
    run.valid = SimpleNamespace(packs=range(5), row=lambda packs: packs)
    run.method = SimpleNamespace(
        denominator=lambda tokens, packs: len(packs),
        metric_names=(),
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
    assert progress.entered == ["validating"] * 5 and told == [{"loss": pytest.approx(np.mean(range(5)))}]
